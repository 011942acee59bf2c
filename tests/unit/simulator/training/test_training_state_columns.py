"""Gradients of many strategies: what is run beside their sums, against the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.domain.trainer import TrainerSpec
from foretoken.domain.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.training.step import simulate_training

_RULES = {"checks_gradients": "true", "scales_gradients": "true", "flattens_gradients": "true"}


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_two_ranks_or_more_run_the_kernels_of_their_sums(num_devices: int) -> None:
    """One rank has nothing to sum, so it neither flattens gradients nor scales them."""
    base = build_scenario(
        ParallelLayout(dp=num_devices),
        model=replace(find_model("llama-2-7b"), num_layers=2),
        global_batch_size=4,
        sequence_length=1024,
        trainer=TrainerSpec(rules=_RULES),
    )
    space = TrainingSpace(
        **dict.fromkeys(("tp", "pp", "cp", "virtual_stages", "micro_batch_sizes"), (1,)),
        zero_stages=(0,),
        overlaps=("none",),
        recompute=("none",),
        weight_parallel=("",),
        sequence_parallel=(False,),
    )
    strategies = resolve_space(TrainingSearchRequest(scenario=base, space=space)).piece(0, 1)
    report = simulate_training(strategies.scenario(0), RooflinePredictor(), None)
    found = StepTimer(base, RooflinePredictor()).time(strategies)
    np.testing.assert_allclose(found.step_us / 1000, report.step_time_ms, rtol=1e-9)
