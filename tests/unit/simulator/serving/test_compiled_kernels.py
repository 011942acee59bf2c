"""Kernels of products in FP8 that a fresh server compiles while requests wait."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.frameworks.deep_gemm import choose_tile
from foretoken.domain.frameworks.engine import EngineProfile, EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.compiled_kernels import CompiledKernels, find_kernels
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_STEP_US, _COMPILE_US = 10.0, 100.0
_ENGINE = EngineProfile(name="mine", engine="mine", max_num_seqs=4)
# Two products: one kernel for up to four tokens, another beyond; one of all tokens, alike.
_OWN = np.array([[0] * 5 + [1] * 8])
_GROUP = np.array([[2] * 9 + [3] * 17])
_FRESH = {"is_fresh": "true"}


def _kernels(*ready: int) -> CompiledKernels:
    is_ready = np.isin(np.arange(4), ready)
    return CompiledKernels(us=_COMPILE_US, own=_OWN, group=_GROUP, ready=is_ready)


def _compiled(prompts: list[int], kernels: CompiledKernels, num_engines: int = 1) -> list[int]:
    """Return how many kernels the first step of each instant waits for; prompts come by pairs."""
    num_prefill = np.array(prompts)
    arrival_ns = np.arange(len(prompts)) // num_engines * 10**9
    plan = plan_requests(arrival_ns, num_prefill, 0 * num_prefill + 1)
    setup = DeploymentSetup(
        profile=_ENGINE,
        num_kv_blocks=99,
        num_engines=num_engines,
        is_lock_step=num_engines > 1,
        kernels=kernels,
    )
    record = run_deployment(plan, setup, flat_tables(_STEP_US, 0.0), lambda _: None)
    steps = record.steps[0]
    waits_us = (np.asarray(steps.start_ns) - np.asarray(steps.scheduled_ns)) / 1000
    found: list[int] = np.rint(waits_us / _COMPILE_US).astype(int).tolist()
    return found


def test_a_kernel_is_compiled_once() -> None:
    assert _compiled([4, 3, 5, 12, 4], _kernels()) == [2, 0, 1, 1, 0]


def test_what_a_server_has_as_it_starts_takes_no_time() -> None:
    assert _compiled([4, 12], _kernels(0, 2)) == [0, 2]
    assert _compiled([4, 12], _kernels(0, 1, 2, 3)) == [0, 0]


def test_engines_in_lock_step_wait_for_the_one_that_has_most_to_compile() -> None:
    """Of 4 and 8 tokens each has one kernel of its own to compile, at once; of 12, one together."""
    assert _compiled([4, 8, 8, 4], _kernels(2), num_engines=2) == [2, 1]


@pytest.fixture
def scenario() -> ServingScenario:
    return ServingScenario(
        model=find_model("deepseek-v3"),
        device="h200_sxm",
        quantization="fp8_block",
        layout=ParallelLayout(tp=8, ep=8),
        engine=EngineSpec(
            profile="trtllm-1.0", max_num_seqs=64, max_num_batched_tokens=900, rules=_FRESH
        ),
    )


def _found(scenario: ServingScenario) -> CompiledKernels | None:
    return find_kernels(scenario, scenario.resolve_engine())


def test_products_of_a_rank_are_those_of_its_model(scenario: ServingScenario) -> None:
    """Four of attention, two of dense layers, two of shared experts; two of the experts held."""
    found = _found(scenario)
    assert found is not None
    assert (found.own.shape, found.group.shape) == ((8, 901), (2, 901))
    rows = [150, 160, 170]
    down = {choose_tile(count, 2112, 7168, 132) for count in rows}
    assert len(down) == len(set(found.own[0, rows].tolist())) == 1
    # Eight of 256 experts each: one row of the 32 of a rank, and two.
    experts = [choose_tile(count, 4096, 7168, 132, 32) for count in (1, 2)]
    assert (experts[0] == experts[1]) == (found.group[0, 32] == found.group[0, 33])


def test_graphs_and_the_largest_step_are_compiled_as_the_server_starts(
    scenario: ServingScenario,
) -> None:
    found = _found(scenario)
    assert found is not None
    assert found.ready[found.own[:, 900]].all()
    assert found.ready[found.own[:, 64]].all()
    assert not found.ready.all()
    eager = replace(scenario.engine, rules={**_FRESH, "graph_mode": "none"})
    without = _found(replace(scenario, engine=eager))
    assert without is not None
    assert without.ready.sum() < found.ready.sum()


def test_attention_in_data_parallel_has_all_heads_and_the_experts_all_tokens(
    scenario: ServingScenario,
) -> None:
    found = _found(replace(scenario, layout=ParallelLayout(dp=8, ep=8)))
    assert found is not None
    assert found.group.shape == (2, 7201)


def test_servers_that_had_requests_and_other_chips_compile_nothing(
    scenario: ServingScenario,
) -> None:
    assert _found(replace(scenario, engine=replace(scenario.engine, rules={}))) is None
    assert _found(replace(scenario, device="b200_sxm")) is None
    assert _found(replace(scenario, engine=EngineSpec(profile="vllm-0.14", rules=_FRESH))) is None
    assert _found(replace(scenario, quantization="fp8")) is None
