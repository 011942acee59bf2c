"""Steps of many strategies: when buckets of gradients are reduced, against the simulator."""

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
from foretoken.simulator.training.memory_plan import plan_memory
from foretoken.simulator.training.step import simulate_training


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 7])
def test_a_bucket_is_reduced_when_the_pass_has_made_it(num_buckets: int) -> None:
    """Reductions over two nodes take longer than what they run beside, so the first counts."""
    model = replace(find_model("llama-2-7b"), num_layers=4)
    plain = build_scenario(
        ParallelLayout(dp=16), model=model, global_batch_size=16, sequence_length=256
    )
    num_elements = -(-int(plan_memory(plain).num_params) // num_buckets)
    trainer = TrainerSpec(rules={"bucket_elements": str(num_elements)})
    base = replace(plain, trainer=trainer)
    space = TrainingSpace(
        **dict.fromkeys(("tp", "pp", "cp", "virtual_stages", "micro_batch_sizes"), (1,)),
        zero_stages=(0,),
        overlaps=("data",),
        recompute=("none",),
        weight_parallel=("",),
        sequence_parallel=(False,),
    )
    strategies = resolve_space(TrainingSearchRequest(scenario=base, space=space)).piece(0, 1)
    report = simulate_training(strategies.scenario(0), RooflinePredictor(), None)
    found = StepTimer(base, RooflinePredictor()).time(strategies)
    np.testing.assert_allclose(found.step_us / 1000, report.step_time_ms, rtol=1e-6)
