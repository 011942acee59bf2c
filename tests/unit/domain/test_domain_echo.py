"""What answers say of themselves: the question in a line, and what the times rest on."""

from dataclasses import replace

import pytest

from foretoken.domain.models.load import load_model
from foretoken.domain.requests.cluster import ClusterSpec, ReplicaPool
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.question import (
    OBJECTIVE_WORDS,
    describe_capacity,
    describe_run,
    describe_serving,
    describe_serving_search,
    describe_training_search,
    name_request,
)
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import (
    OBJECTIVES,
    CapacityRequest,
    LatencyLimit,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.training_run import TrainingRunRequest
from foretoken.domain.requests.training_search import (
    TRAINING_OBJECTIVES,
    NodeGroup,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.domain.results.echo import Echo, describe_time_shares

_SERVING = ServingScenario(
    model=load_model("llama-3.1-8b"),
    device="h200",
    layout=ParallelLayout(tp=2),
    quantization="fp8",
    slo=Slo(ttft_ms=2000),
)
_TRAINING = TrainingScenario(
    model=load_model("llama-2-7b"), device="a100", layout=ParallelLayout(tp=2, dp=4)
)
_TARGETS = ServingTargets(
    limits=(
        LatencyLimit(metric="ttft_ms", percentile=0, limit_ms=2000),
        LatencyLimit(metric="e2e_latency_ms", percentile=99, limit_ms=30),
    )
)


def test_a_question_is_told_as_it_was_understood() -> None:
    """Names are resolved and defaults filled in."""
    assert describe_serving(_SERVING) == (
        "llama-3.1-8b in bf16, weights fp8; on 2 x h200_sxm (tp 2); engine vllm-0.28; 100 requests"
        " at 1/s (poisson), 512 prompt and 128 answer tokens; SLO TTFT at most 2 s"
    )
    assert describe_run(TrainingRunRequest(scenario=_TRAINING, num_tokens=1e12, target_days=9)) == (
        "training llama-2-7b in bf16 (trainer plain); on 8 x a100_sxm_80 (tp 2, dp 4); steps of 8"
        " samples of 4,096 tokens, 1 at a time; 1e+12 tokens; to be done in 9 days"
    )


def test_a_search_tells_its_space_and_its_targets() -> None:
    space = ServingSpace(devices=("h200", "h100"), max_devices=16)
    request = ServingSearchRequest(
        scenario=_SERVING, space=space, targets=_TARGETS, target_rps=20, objective="cost"
    )
    assert describe_serving_search(request) == (
        "the best deployment of llama-3.1-8b in bf16, weights fp8 by least cost per token; on up to"
        " 16 x h200_sxm, h100_sxm; engine vllm-0.28; 100 requests, 512 prompt and 128 answer"
        " tokens; carrying 20 requests/s; targets TTFT mean at most 2 s, end-to-end latency"
        " p99 at most 30 ms"
    )
    capacity = CapacityRequest(scenario=_SERVING, targets=_TARGETS)
    assert describe_capacity(capacity).startswith("the highest rate of llama-3.1-8b in bf16")
    groups = (NodeGroup(device="h200", num_nodes=2), NodeGroup(device="a100", num_nodes=4))
    mixed = TrainingSearchRequest(scenario=_TRAINING, space=TrainingSpace(node_groups=groups))
    assert "on 2 nodes of h200_sxm and 4 nodes of a100_sxm_80" in describe_training_search(mixed)


def test_what_is_asked_has_a_name_of_model_and_devices() -> None:
    space = ServingSpace(devices=("h200", "h100"), max_devices=16)
    groups = (NodeGroup(device="h200", num_nodes=2), NodeGroup(device="a100", num_nodes=1))
    clusters = TrainingSpace(num_devices=(8, 16))
    capacity = CapacityRequest(scenario=_SERVING, targets=_TARGETS)
    expected = {
        "llama-3.1-8b on 2 x h200_sxm (tp 2), 1 requests/s": (_SERVING,),
        "llama-3.1-8b on 2 x h200_sxm (tp 2)": (capacity,),
        "llama-3.1-8b on up to 16 x h200_sxm, h100_sxm": (
            ServingSearchRequest(scenario=_SERVING, space=space),
        ),
        "llama-2-7b on 8 x a100_sxm_80 (tp 2, dp 4)": (_TRAINING,),
        "llama-2-7b on 8, 16 x a100_sxm_80": (
            TrainingSearchRequest(scenario=_TRAINING, space=clusters),
        ),
        "llama-2-7b on 2 nodes of h200_sxm and 1 node of a100_sxm_80": (
            TrainingSearchRequest(scenario=_TRAINING, space=TrainingSpace(node_groups=groups)),
        ),
    }
    for name, requests in expected.items():
        assert {name} == {name_request(request) for request in requests}


def test_every_objective_has_words() -> None:
    assert {*OBJECTIVES, *TRAINING_OBJECTIVES} == set(OBJECTIVE_WORDS)
    request = ServingSearchRequest(scenario=_SERVING)
    assert "by tokens/s per GPU; on up to" in describe_serving_search(request)


def test_pools_are_told_apart() -> None:
    pools = (
        ReplicaPool(name="p", role="prefill", device="h100", num_replicas=3),
        ReplicaPool(name="d", role="decode"),
    )
    scenario = replace(_SERVING, cluster=ClusterSpec(pools=pools))
    assert (
        "on 3 replicas of h100_sxm (tp 2) (prefill) and 1 replica of h200_sxm (tp 2) (decode)"
        in describe_serving(scenario)
    )


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({}, ""),
        ({"analytical": 1.0}, "100 % data sheet, by time"),
        (
            {"analytical": 0.1, "measured": 0.625, "transferred": 0.275, "interpolated": 0.0},
            "62.5 % measured, 27.5 % transferred from other devices, 10 % data sheet, by time",
        ),
    ],
)
def test_shares_are_told_from_the_strongest_to_the_weakest(
    shares: dict[str, float], expected: str
) -> None:
    assert describe_time_shares(shares) == expected


def test_an_echo_says_only_what_it_has() -> None:
    assert Echo().lines() == []
    echo = Echo(
        question="q", basis="all", time_ratio_by_provenance={"measured": 1.0}, remarks=("r",)
    )
    assert echo.lines() == ["question: q", "rests on: 100 % measured, by time (all)", "note: r"]
    assert echo.lines("A")[0] == "A, question: q"
