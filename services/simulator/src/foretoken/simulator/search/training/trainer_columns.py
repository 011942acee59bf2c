"""What the capabilities of frameworks are judged by, of strategies as columns."""

import numpy as np

from foretoken.domain.training_search import OVERLAPS, WEIGHT_PARALLELS
from foretoken.domain.units import ceil_divide
from foretoken.simulator.search.training.strategies import (
    RECOMPUTE_MODES,
    Strategies,
    trainer_with,
)
from foretoken.simulator.training.schedule import find_schedule
from foretoken.simulator.training.trainer_limit import NamedValues, StrategyFigures

_ISP = WEIGHT_PARALLELS.index("isp")


def find_figures(strategies: Strategies) -> StrategyFigures:
    """Return the figures of strategies that can run."""
    source = strategies.source
    scenario, names = source.scenario, source.pipeline_schedules
    needed = np.array([find_schedule(name).virtual_stages for name in names], dtype=np.int64)
    of_schedule = needed[strategies.pipeline_schedule]
    chunks = np.where(of_schedule > 0, of_schedule, strategies.virtual_stages)
    num_chunks, num_layers = strategies.pp * chunks, scenario.model.num_layers
    is_isp = strategies.weight_parallel == _ISP
    of_data = strategies.cp * strategies.dp
    of_stage = strategies.tp * of_data // np.maximum(1, strategies.weight_degree)
    return StrategyFigures(
        scenario=scenario,
        trainers=[trainer_with(scenario.trainer, name).resolve() for name in OVERLAPS],
        tp=strategies.tp,
        pp=strategies.pp,
        cp=strategies.cp,
        ep=strategies.ep,
        chunks=chunks,
        layers_differ=num_layers % num_chunks != 0,
        max_layers=np.asarray(ceil_divide(num_layers, num_chunks)),
        replicas=np.where(is_isp, of_stage, of_data),
        zero_stage=strategies.zero_stage,
        shard_degree=strategies.shard_degree,
        splits_tokens=strategies.sequence_parallel.astype(np.bool_),
        pipeline_schedule=NamedValues(places=strategies.pipeline_schedule, names=names),
        weight_parallel=NamedValues(places=strategies.weight_parallel, names=WEIGHT_PARALLELS),
        recompute=NamedValues(places=strategies.recompute, names=RECOMPUTE_MODES),
        trainer=strategies.overlap,
    )
