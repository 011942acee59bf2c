"""Models of every family served: they fit or say why not, and run."""

from dataclasses import replace

import pytest
from serving_fakes import build_scenario, plain_engine, simulate
from slow_cases import slow_but

from foretoken.domain.models.architecture import all_models, find_model
from foretoken.domain.models.stack import stack_of, state_of
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.cluster.setup import KvTransferSetup
from foretoken.simulator.serving.feasibility import plan_memories

_FAMILIES = (
    *("deepseek-v3.2", "deepseek-v4-flash", "gemma-4-26b-a4b", "glm-5.2-fp8", "kimi-k3"),
    *("glm-5.3-flash", "deepseek-v4.1-flash"),
    *("llama-4-scout-17b-16e", "mimo-v2-flash", "minimax-m2.5", "minimax-m3-nvfp4"),
    *("nemotron-3-nano-30b-a3b", "qwen3.5-397b-a17b-nvfp4", "step-3.7-flash", "bloom-176b"),
    *("falcon-mamba-7b", "gemma-4-e2b", "jamba-1.5-mini", "minimax-text-01"),
)
_WORKLOAD = WorkloadSpec(
    num_requests=6,
    rate_rps=20.0,
    prefill=LengthSpec(kind="fixed", mean=300),
    decode=LengthSpec(kind="fixed", mean=8),
)


def _scenario(name: str, num_layers: int = 0, tp: int = 8) -> ServingScenario:
    model = find_model(name)
    if num_layers:
        # One layer of each kind: what is simulated does not depend on how many there are.
        pattern = " ".join(layer.name for layer in model.layers)
        model = replace(model, num_layers=0, pattern=pattern)
    return build_scenario(
        model=model,
        device="b200_sxm",
        layout=ParallelLayout(tp=tp),
        engine=plain_engine(max_num_seqs=8, max_num_batched_tokens=512),
        workload=_WORKLOAD,
    )


# Eight ranks do not divide these heads.
_OF_FEW_HEADS = ("gemma-3-1b", "phi-4")


def test_every_model_has_a_memory_plan() -> None:
    """Only the largest do not fit on eight devices of 180 GB."""
    unfit = []
    for name, model in all_models().items():
        if not model.layers:
            continue
        scenario = _scenario(name, tp=2 if name in _OF_FEW_HEADS else 8)
        [memory] = plan_memories(scenario, scenario.resolve_engine())
        states = [state_of(part) for part in stack_of(model).mixers]
        is_recurrent = any(state.request_bytes for state in states)
        assert is_recurrent == (memory.state_bytes > 0), name
        has_cache = any(state.token_elements or state.token_bytes for state in states)
        assert has_cache == (memory.kv_bytes_per_token > 0), name
        if memory.infeasibility:
            unfit.append(name)
    qwen = ["qwen3.8-2.4t-a95b-fp8", "qwen3.8-2.4t-a95b"]
    assert ["deepseek-v4-pro-fp8", "glm-5.2", "glm-5", "kimi-k3", *qwen] == unfit


@pytest.mark.parametrize(
    "name", slow_but(["deepseek-v3.2", "gemma-4-26b-a4b", "kimi-k3", "jamba-1.5-mini"], _FAMILIES)
)
def test_a_model_of_every_family_is_served(name: str) -> None:
    report = simulate(_scenario(name, num_layers=1))
    assert report.feasibility.is_feasible
    requests = report.requests
    assert [8] * 6 == list(requests.num_decode_tokens)
    assert all(requests.first_token_s > requests.arrival_s)


def test_a_transfer_sends_recurrent_states_once() -> None:
    transfer = KvTransferSetup(
        bytes_per_token=10.0, window_bytes_per_token=4.0, window_tokens=100, state_bytes=7000.0
    )
    assert (7000 + 50 * 14, 7000 + 300 * 10 + 100 * 4) == (
        transfer.bytes_of(50),
        transfer.bytes_of(300),
    )
