import json
from dataclasses import replace
from typing import Any

import pytest
from serving_fakes import RooflinePredictor, SilentProgress, build_scenario

from foretoken.domain import schema
from foretoken.domain.errors import CancelledJobError, InvalidRequestError
from foretoken.domain.requests.cluster import ClusterSpec, KvTransferSpec, ReplicaPool
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CapacityReport,
    CapacityRequest,
    LatencyLimit,
    ServingTargets,
)
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, Request, SessionSpec, WorkloadSpec
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.search.capacity.find import find_capacity
from foretoken.simulator.search.capacity.load_search import Bound, take_bound
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.serving.simulation import simulate_serving
from foretoken.simulator.serving.step_cost import SurfaceCost

_PREDICTOR = RooflinePredictor()
_WORKLOAD = WorkloadSpec(
    rate_rps=2.0,
    num_requests=80,
    prefill=LengthSpec(kind="uniform", minimum=20, maximum=600),
    decode=LengthSpec(kind="uniform", minimum=4, maximum=40),
)
_TARGETS = ServingTargets(limits=(LatencyLimit(metric="ttft_ms", percentile=90, limit_ms=300),))


def _scenario(**changes: Any) -> ServingScenario:
    return build_scenario(**{"workload": _WORKLOAD, **changes})


def _fetch(spec: Any) -> Any:
    return fetch_surfaces(spec, _PREDICTOR)


def _find(
    scenario: ServingScenario, targets: ServingTargets = _TARGETS, **options: Any
) -> CapacityReport:
    request = CapacityRequest(
        scenario=scenario, targets=targets, **{"tolerance_ratio": 0.05, **options}
    )
    return find_capacity(request, _fetch, InlineContext())


def _p90_ttft(scenario: ServingScenario, rate_rps: float) -> float:
    """Return what a whole simulation at a rate says, up to the largest wait: TTFT P90 in ms."""
    workload = replace(scenario.workload, rate_rps=rate_rps)
    result = simulate_serving(replace(scenario, workload=workload), _fetch, SilentProgress())
    return result.report.ttft_ms.p90


@pytest.fixture(scope="module")
def report() -> CapacityReport:
    """What a search answers for the plain scenario."""
    return _find(_scenario())


def test_simulations_at_the_answer_agree(report: CapacityReport) -> None:
    """At the rate found a simulation meets the limit, at the next one it does not."""
    assert report.first_miss_rps == pytest.approx(1.05 * report.capacity_rps)
    assert _p90_ttft(_scenario(), report.capacity_rps) <= 300
    assert _p90_ttft(_scenario(), report.first_miss_rps) > 300
    assert report.at_capacity.ttft_ms.p90 == _p90_ttft(_scenario(), report.capacity_rps)
    assert report.limiting == "TTFT p90"
    assert report.capacity_rps_per_gpu == report.capacity_rps


def test_the_report_s_scenario_gives_the_run_again(report: CapacityReport) -> None:
    """Its resolved configuration has the rate that was found; arrivals are equal to the ns."""
    again = schema.decode(ServingScenario, json.loads(report.at_capacity.scenario_json))
    result = simulate_serving(again, _fetch, SilentProgress())
    for name in ("ttft_ms", "e2e_latency_ms"):
        given, found = (getattr(each, name).mean for each in (report.at_capacity, result.report))
        assert found == pytest.approx(given, abs=1e-6)


def test_the_same_question_has_the_same_answer(report: CapacityReport) -> None:
    """Bit for bit, intervals and all; only the time it took differs."""
    again = replace(_find(_scenario()), cpu_s=report.cpu_s)
    assert report == again


def test_interval_holds_the_answer_and_the_predictor_s_part() -> None:
    """The data sheet's bounds are 0.8 and 1.5 times: the interval is about that wide, or more."""
    report = _find(_scenario(), confidence_ratio=0.9)
    assert report.low_rps < report.sampling_low_rps <= report.capacity_rps
    assert report.first_miss_rps <= report.sampling_high_rps < report.high_rps
    assert report.low_rps < report.capacity_rps / 1.4
    assert report.high_rps > report.capacity_rps * 1.2


def test_steps_at_a_bound_take_what_accounts_say() -> None:
    """Tables at the low bound are 0.8 of the estimates, launches apart."""
    scenario = _scenario()
    surfaces = _fetch(surface_spec(scenario, 2048))
    plain = SurfaceCost(surfaces).tables
    ratios: tuple[tuple[Bound, float], ...] = (("low", 0.8), ("high", 1.5))
    for bound, ratio in ratios:
        bounded = SurfaceCost(take_bound(surfaces, bound)).tables
        assert bounded.tokens_us == pytest.approx(plain.tokens_us * ratio)
        assert bounded.prefill_us == pytest.approx(plain.prefill_us * ratio)
        assert bounded.floor_us.tolist() == plain.floor_us.tolist()


def test_attainment_is_a_target() -> None:
    """The share of requests in their SLO is met at the answer and missed at the next rate."""
    scenario = _scenario(slo=Slo(ttft_ms=400.0, tpot_ms=60.0))
    report = _find(scenario, ServingTargets(slo_attainment_ratio=0.9))
    assert report.at_capacity.slo_attainment_ratio >= 0.9
    missed = next(probe for probe in report.probes if probe.rate_rps == report.first_miss_rps)
    assert missed.outcomes[0].value < 0.9
    assert report.limiting == "SLO attainment"


def test_closed_loops_are_refused() -> None:
    """The message says what to give instead."""
    workload = replace(_WORKLOAD, arrival="closed_loop", arrival_options={"concurrency": "4"})
    with pytest.raises(InvalidRequestError, match="poisson with rate_rps"):
        _find(_scenario(workload=workload))


def test_requests_all_at_once_are_refused() -> None:
    """There is nothing to stretch."""
    request = Request(arrival_s=0.0, num_prefill_tokens=8, num_decode_tokens=8)
    workload = WorkloadSpec(arrival="trace", trace_requests=(request,) * 3)
    with pytest.raises(InvalidRequestError, match="all at once"):
        _find(_scenario(workload=workload))


def test_what_cannot_be_met_says_why() -> None:
    """A prompt takes longer than its limit even where requests hardly meet."""
    targets = ServingTargets(limits=(LatencyLimit(metric="ttft_ms", percentile=50, limit_ms=1),))
    report = _find(_scenario(), targets)
    assert not report.feasibility.is_feasible
    assert "TTFT p50 is" in report.feasibility.reason
    assert "the limit 1 ms" in report.feasibility.reason
    assert (report.capacity_rps, report.low_rps, report.high_rps) == (0, 0, 0)
    assert report.probes


def test_a_deployment_that_serves_nobody_says_why() -> None:
    """No request is late where all are refused, which is no capacity."""
    workload = WorkloadSpec(
        num_requests=8, prefill=LengthSpec(kind="fixed", mean=1_000_000), decode=LengthSpec(mean=8)
    )
    report = _find(_scenario(workload=workload))
    assert not report.feasibility.is_feasible
    assert "longer than the model's context" in report.feasibility.reason
    assert report.capacity_rps == 0


def test_a_deployment_that_does_not_fit_says_why() -> None:
    """It is a result with a reason, without runs."""
    report = _find(_scenario(layout=ParallelLayout(tp=3)))
    assert not report.feasibility.is_feasible
    assert report.feasibility.reason
    assert report.probes == ()


def test_the_highest_rate_to_try() -> None:
    """Where it meets the targets nothing limits, and the interval is that rate."""
    report = _find(_scenario(), max_rps=1.0)
    assert 0.95 <= report.capacity_rps <= 1.0
    assert report.first_miss_rps == 0
    assert report.limiting == ""
    assert (report.low_rps, report.high_rps) == (report.capacity_rps, report.capacity_rps)


def test_sessions_keep_their_think_times() -> None:
    """The rate is that of sessions; turns follow each other as they do at any rate."""
    sessions = SessionSpec(turns=LengthSpec(mean=3), think_s=1.0)
    scenario = _scenario(workload=replace(_WORKLOAD, sessions=sessions))
    report = _find(scenario)
    assert (
        _p90_ttft(scenario, report.capacity_rps) <= 300 < _p90_ttft(scenario, report.first_miss_rps)
    )


def test_a_trace_is_stretched() -> None:
    """The answer is in requests per second of its own times; its scenario has the time scale."""
    rows = [
        Request(arrival_s=0.5 * at + 0.3 * (at % 3), num_prefill_tokens=200, num_decode_tokens=10)
        for at in range(100)
    ]
    workload = WorkloadSpec(arrival="trace", trace_requests=tuple(rows))
    report = _find(_scenario(workload=workload))
    assert report.at_capacity.offered_rps == pytest.approx(report.capacity_rps, rel=1e-6)
    told = json.loads(report.at_capacity.scenario_json)["workload"]["time_scale"]
    assert told == pytest.approx(99 / 49.5 / report.capacity_rps, rel=1e-2)
    assert report.sampling_low_rps <= report.capacity_rps <= report.sampling_high_rps


def test_more_engines_serve_more() -> None:
    """Two replicas carry between 1.5 and 2.5 times the rate of one."""
    one, two = (_find(_scenario(layout=ParallelLayout(dp=dp))) for dp in (1, 2))
    assert two.num_devices == 2
    assert 1.5 < two.capacity_rps / one.capacity_rps < 2.5
    assert two.capacity_rps_per_gpu == two.capacity_rps / 2


@pytest.mark.parametrize(
    "pools",
    [
        (ReplicaPool(name="all", num_replicas=2),),
        (ReplicaPool(name="prompts", role="prefill"), ReplicaPool(name="answers", role="decode")),
    ],
    ids=["aggregated", "disaggregated"],
)
def test_clusters_are_searched(pools: tuple[ReplicaPool, ...]) -> None:
    """A simulation of the cluster meets the limit at the rate found, and not at the next."""
    transfer = KvTransferSpec(bandwidth_bytes_per_s=1e10)
    scenario = _scenario(cluster=ClusterSpec(pools=pools, kv_transfer=transfer))
    report = _find(scenario)
    assert report.num_devices == 2
    assert (
        _p90_ttft(scenario, report.capacity_rps) <= 300 < _p90_ttft(scenario, report.first_miss_rps)
    )


def test_a_search_can_be_cancelled() -> None:
    """The error of the progress passes."""

    class Cancelled(InlineContext):
        def update(self, ratio: float, message: str = "") -> None:
            if ratio > 0.1:
                raise CancelledJobError(message)

    request = CapacityRequest(scenario=_scenario(), targets=_TARGETS)
    with pytest.raises(CancelledJobError):
        find_capacity(request, _fetch, Cancelled())
