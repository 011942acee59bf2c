"""Kernels that an engine compiles for every number of prompts' tokens, once."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.stack import stack_of
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.compiled_kernels import kernels_of_lengths
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_STEP_US, _COMPILE_US = 10.0, 100.0
_ENGINE = EngineProfile(name="mine", engine="mine", max_num_seqs=4)
_KERNELS = kernels_of_lengths(_COMPILE_US, _ENGINE.max_num_batched_tokens)


def _arrivals_to_tokens_us(prompts: list[int], *, is_async: bool = False) -> list[float]:
    """Return what requests, one after the other, take to their first token."""
    num_prefill = np.array(prompts)
    plan = plan_requests(0 * num_prefill, num_prefill, 0 * num_prefill + 2)
    setup = DeploymentSetup(
        profile=replace(_ENGINE, has_async_scheduling=is_async),
        num_kv_blocks=1000,
        kernels=_KERNELS,
    )
    tables = flat_tables(_STEP_US, 0.0)
    requests = run_deployment(replace(plan, concurrency=1), setup, tables, lambda _: None).requests
    times_ns = np.asarray(requests.first_token_ns) - np.asarray(requests.arrival_ns)
    found: list[float] = (times_ns / 1000).tolist()
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_prompt_of_a_length_waits_for_them(is_async: bool) -> None:
    found = _arrivals_to_tokens_us([4, 4, 5, 4, 5], is_async=is_async)
    first, later = _COMPILE_US + _STEP_US, _STEP_US
    assert found == [first, later, first, later, later]


def test_prompts_of_a_step_count_together() -> None:
    """Two of four tokens, and one of eight, are the same number; one of four is not."""
    num_prefill = np.array([4, 4, 8, 4])
    plan = plan_requests(np.array([0, 0, 10**6, 2 * 10**6]), num_prefill, 0 * num_prefill + 1)
    setup = DeploymentSetup(profile=_ENGINE, num_kv_blocks=1000, kernels=_KERNELS)
    record = run_deployment(plan, setup, flat_tables(_STEP_US, 0.0), lambda _: None)
    starts_ns = record.steps[0].start_ns - record.steps[0].scheduled_ns
    assert (starts_ns / 1000).tolist() == [_COMPILE_US, 0.0, _COMPILE_US]


def test_sglang_compiles_for_linear_attention_until_it_was_mended() -> None:
    linear = [kind.name for kind in stack_of(find_model("qwen3.5-397b-a17b")).kinds]
    full = [kind.name for kind in stack_of(find_model("qwen3-235b-a22b")).kinds]
    assert find_engine("sglang-0.5.9").compile_us_of(linear) == 52_670
    assert find_engine("sglang-0.5.9").compile_us_of(full) == 0
    assert find_engine("sglang-0.5.20").compile_us_of(linear) == 0


def test_a_time_below_zero_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"compile_us\.kda"):
        replace(_ENGINE, compile_us={"kda": -1.0})
