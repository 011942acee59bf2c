"""Images that are encoded by replicas of their own."""

from dataclasses import replace

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario, simulate

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.image import find_encoder
from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    ClusterSpec,
    FailureSpec,
    KvTransferSpec,
    ReplicaOutage,
    ReplicaPool,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import ImageSpec, LengthSpec, SessionSpec, WorkloadSpec
from foretoken.simulator.cluster.fleet import encoder_scenario, pool_scenarios
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.serving.scenario_check import check_scenario

_EYES = find_encoder(find_model("qwen3-vl-235b-a22b"))
_MODEL = replace(find_model("qwen2-7b"), extras=(_EYES,) if _EYES else ())
_TWO = ImageSpec(num_images=2)
# Two images of 1,024 tokens, of each of which there are vectors for the first layer and three more.
_BYTES = 2048 * 4 * _MODEL.hidden * 2
_LINK = KvTransferSpec(bandwidth_bytes_per_s=10e9, latency_us=50)
_SENT_MS = _BYTES / 10e9 * 1e3 + 0.05
_ENGINES = ReplicaPool(name="engines")


def _scenario(*pools: ReplicaPool, **changes: object) -> ServingScenario:
    workload = WorkloadSpec(
        arrival="constant",
        rate_rps=0.01,
        num_requests=1,
        prefill=LengthSpec(mean=3000),
        decode=LengthSpec(mean=4),
        images=_TWO,
    )
    return build_scenario(
        model=_MODEL,
        device="h100_sxm",
        workload=replace(workload, **changes),  # type: ignore[arg-type]
        cluster=ClusterSpec(pools=pools, kv_transfer=_LINK),
    )


def _eyes(num_replicas: int = 1, tp: int = 1) -> ReplicaPool:
    layout = ParallelLayout(tp=tp)
    return ReplicaPool(name="eyes", role="encoder", num_replicas=num_replicas, layout=layout)


def _encode_ms(scenario: ServingScenario) -> float:
    """Return what the images of one prompt take a replica that has but the encoder."""
    replica = encoder_scenario(scenario)
    assert replica is not None
    return fetch_surfaces(surface_spec(replica, 4096), RooflinePredictor()).encoding_us / 1e3


def _waits_ms(scenario: ServingScenario) -> list[float]:
    """Return from each request's arrival until its engine has it."""
    requests = simulate(scenario).requests
    waits = np.asarray(requests.queued_s) - np.asarray(requests.arrival_s)
    return (1e3 * waits).tolist()


def test_a_prompt_waits_for_its_images_and_for_their_way() -> None:
    apart, blind = _scenario(_ENGINES, _eyes()), _scenario(_ENGINES, images=None)
    added_ms = simulate(apart).ttft_ms.mean - simulate(blind).ttft_ms.mean
    assert added_ms == pytest.approx(_encode_ms(apart) + _SENT_MS, rel=1e-4)


def test_an_engine_encodes_in_its_prefill_what_is_not_apart() -> None:
    together, apart = _scenario(_ENGINES), _scenario(_ENGINES, _eyes())
    added_ms = simulate(apart).ttft_ms.mean - simulate(together).ttft_ms.mean
    assert added_ms == pytest.approx(_SENT_MS, rel=0.1)


def test_prompts_wait_for_an_encoder_in_turn() -> None:
    """Three at once, for idle engines: one replica encodes one by one, two at the same time."""
    three = {"num_requests": 3, "rate_rps": 1e6}
    engines = replace(_ENGINES, num_replicas=3)
    scenario = _scenario(engines, _eyes(), **three)
    once = _encode_ms(scenario)
    assert [once + _SENT_MS, 2 * once + _SENT_MS, 3 * once + _SENT_MS] == pytest.approx(
        _waits_ms(scenario), rel=1e-3
    )
    assert [once + _SENT_MS, once + _SENT_MS, 2 * once + _SENT_MS] == pytest.approx(
        _waits_ms(_scenario(engines, _eyes(2), **three)), rel=1e-3
    )


def test_encoders_stand_before_prefill_and_decode() -> None:
    pools = (
        ReplicaPool(name="prompts", role="prefill"),
        ReplicaPool(name="answers", role="decode"),
    )
    with_eyes, blind = _scenario(*pools, _eyes()), _scenario(*pools, images=None)
    found, expected = simulate(with_eyes), simulate(blind)
    added_ms = found.ttft_ms.mean - expected.ttft_ms.mean
    assert added_ms == pytest.approx(_encode_ms(with_eyes) + _SENT_MS, rel=1e-4)
    assert found.transfer_ms.mean == pytest.approx(expected.transfer_ms.mean)


def test_their_devices_are_reported_and_paid_for() -> None:
    eyes = replace(_eyes(2, tp=2), device_usd_per_hour=2.0)
    scenario = _scenario(replace(_ENGINES, device_usd_per_hour=3.0), eyes, num_requests=5)
    report = simulate(scenario)
    engines, encoders = report.pools
    assert ("eyes", "encoder", 2, 4, 5) == (
        encoders.name,
        encoders.role,
        encoders.num_engines,
        encoders.num_devices,
        encoders.num_requests,
    )
    assert 5 == report.num_devices == scenario.num_devices
    hours = report.duration_s / 3600
    assert encoders.cost_usd == pytest.approx(8 * hours)
    assert report.cost_usd == pytest.approx(engines.cost_usd + encoders.cost_usd)
    busy_s = 5 * _encode_ms(scenario) / 1e3
    assert encoders.utilization_ratio == pytest.approx(busy_s / report.duration_s / 2, rel=1e-4)
    assert encoders.sent_bytes_per_s * report.duration_s == pytest.approx(5 * _BYTES)
    per_gpu = report.output_throughput_tps / report.output_throughput_tps_per_gpu
    assert per_gpu == pytest.approx(5)


def test_engines_do_not_hold_the_weights_of_an_encoder_that_is_apart() -> None:
    apart, together = (_scenario(_ENGINES, *more) for more in ((_eyes(),), ()))
    weights = [simulate(each).memory[0].weights_bytes for each in (apart, together)]
    assert weights[0] < weights[1]
    assert pool_scenarios(apart)[0].model.extras == ()


def test_a_later_turn_has_images_that_encoders_know() -> None:
    turns = SessionSpec(turns=LengthSpec(mean=2), think_s=1.0)
    report = simulate(_scenario(_ENGINES, _eyes(), sessions=turns, num_requests=4))
    assert 2 == report.pools[1].num_requests


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ((_eyes(),), "must be all aggregated"),
        ((_ENGINES, _eyes(), replace(_eyes(), name="more")), "of encoder at most one"),
        ((_ENGINES, replace(_eyes(), layout=ParallelLayout(pp=2))), "split over tp alone"),
        (
            (_ENGINES, replace(_eyes(), autoscaling=AutoscalingSpec(policy="queue_length"))),
            "without autoscaling",
        ),
    ],
)
def test_pools_of_encoders_that_cannot_be(pools: tuple[ReplicaPool, ...], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ClusterSpec(pools=pools)


def test_encoders_do_not_fail() -> None:
    outage = ReplicaOutage(pool="eyes", replica=0, start_s=1, restart_s=1)
    with pytest.raises(InvalidRequestError, match="no pool of encoders"):
        ClusterSpec(pools=(_ENGINES, _eyes()), failures=FailureSpec(outages=(outage,)))


def test_encoders_need_images_and_an_engine_that_can() -> None:
    with pytest.raises(InvalidRequestError, match=r"set workload\.images"):
        simulate(_scenario(_ENGINES, _eyes(), images=None))
    scenario = _scenario(_ENGINES, _eyes())
    check_scenario(replace(scenario, engine=EngineSpec(profile="vllm-0.31")))
    with pytest.raises(InvalidRequestError, match="trtllm-1"):
        check_scenario(replace(scenario, engine=EngineSpec(profile="trtllm-1.0")))
