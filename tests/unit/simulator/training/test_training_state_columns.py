"""Gradients of many strategies: what is run in addition to their sums, against the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from strategy_step import time_both_ways
from training_fakes import build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout

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
    found_ms, expected_ms = time_both_ways(base, "none")
    np.testing.assert_allclose(found_ms, expected_ms, rtol=1e-9)
