"""Steps of many strategies: when buckets of gradients are reduced, against the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from strategy_step import time_both_ways
from training_fakes import build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.training.memory_plan import plan_memory


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 7])
def test_a_bucket_is_reduced_when_the_pass_has_made_it(num_buckets: int) -> None:
    """Reductions over two nodes take longer than what they overlap with, so the first counts."""
    model = replace(find_model("llama-2-7b"), num_layers=4)
    plain = build_scenario(
        ParallelLayout(dp=16), model=model, global_batch_size=16, sequence_length=256
    )
    num_elements = -(-int(plan_memory(plain).num_params) // num_buckets)
    trainer = TrainerSpec(rules={"bucket_elements": str(num_elements)})
    base = replace(plain, trainer=trainer)
    found_ms, expected_ms = time_both_ways(base, "data")
    np.testing.assert_allclose(found_ms, expected_ms, rtol=1e-6)
