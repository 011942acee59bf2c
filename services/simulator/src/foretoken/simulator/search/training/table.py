"""The best strategies of a search as the table that its report carries."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.requests.training_search import WEIGHT_PARALLELS, StrategyColumns
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.survey import find_fronts
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES


def build_table(answers: Answers, rank: Ints, prices: Floats) -> StrategyColumns:
    """Return the columns of strategies in their order; the fronts are of those given."""
    strategies = answers.strategies
    source = strategies.source
    is_front_cost, is_front_memory = find_fronts(answers, prices)
    return StrategyColumns(
        name=_texts(strategies.names(np.arange(len(answers)))),
        device=_pick(source.devices, strategies.device),
        num_devices=strategies.num_devices,
        tp=strategies.tp,
        pp=strategies.pp,
        virtual_stages=strategies.virtual_stages,
        dp=strategies.dp,
        cp=strategies.cp,
        ep=strategies.ep,
        micro_batch_size=strategies.micro_batch_size,
        num_micro_batches=strategies.num_micro_batches,
        global_batch_size=strategies.global_batch_size,
        sequence_parallel=strategies.sequence_parallel.astype(np.bool_),
        zero_stage=strategies.zero_stage,
        shard_degree=strategies.shard_degree,
        overlap=_texts(strategies.overlaps()),
        recompute=_pick(RECOMPUTE_MODES, strategies.recompute),
        weight_parallel=_pick(WEIGHT_PARALLELS, strategies.weight_parallel),
        weight_degree=strategies.weight_degree,
        pipeline_schedule=_pick(source.pipeline_schedules, strategies.pipeline_schedule),
        placement=_texts(strategies.placements()),
        stage_layers=_texts(strategies.stage_cuts()),
        step_time_ms=answers.step_us / US_PER_MS,
        step_time_low_ms=answers.low_us / US_PER_MS,
        step_time_high_ms=answers.high_us / US_PER_MS,
        tokens_per_s=answers.tokens_per_s,
        tokens_per_s_per_gpu=answers.tokens_per_s_per_gpu,
        mfu_ratio=answers.mfu_ratio,
        bubble_ratio=answers.bubble_ratio,
        exposed_communication_ratio=answers.exposed_ratio,
        reserved_bytes=answers.reserved_bytes,
        margin_bytes=answers.margin_bytes,
        usd_per_step=answers.usd_per_step(prices),
        usd_per_billion_tokens=answers.usd_per_billion_tokens(prices),
        rank=rank,
        is_pareto_cost=is_front_cost,
        is_pareto_memory=is_front_memory,
    )


def _texts(words: Sequence[str]) -> np.ndarray:
    return np.array(words, dtype=object)


def _pick(names: Sequence[str], codes: Ints) -> np.ndarray:
    chosen: np.ndarray = np.array(names, dtype=object)[codes]
    return chosen
