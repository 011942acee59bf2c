from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from capacity_fakes import drawn_scenario, limits, load_of
from serving_fakes import RooflinePredictor, SilentProgress, build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import LimitOutcome, ServingTargets
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.search.capacity.probe import Judge, count_unseen, make_judge
from foretoken.simulator.search.capacity.rate import draw_plan, take_requests
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord
from foretoken.simulator.serving.simulation import prepare_deployment

_STATISTICS = {"mean": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}


def _scenario() -> ServingScenario:
    return build_scenario(
        workload=WorkloadSpec(
            rate_rps=4.0,
            num_requests=60,
            prefill=LengthSpec(kind="uniform", minimum=20, maximum=900),
            decode=LengthSpec(kind="uniform", minimum=1, maximum=60),
        ),
        slo=Slo(ttft_ms=300.0, itl_ms=60.0),
        slo_classes=(SloClass(name="fast", slo=Slo(tpot_ms=45.0), share_ratio=0.4),),
    )


@cache
def _run() -> tuple[ServingRecord, ServingReport]:
    scenario = _scenario()
    plan = draw_plan(scenario, scenario.seed)
    predictor = RooflinePredictor()
    deployment = prepare_deployment(scenario, lambda spec: fetch_surfaces(spec, predictor), 2048)
    record = deployment.run(plan, SilentProgress().update)
    return record, deployment.report(record, ServingReport())


@pytest.mark.parametrize("metric", LIMITED)
@pytest.mark.parametrize("statistic", _STATISTICS)
def test_figures_are_those_of_the_report(metric: str, statistic: str) -> None:
    """Every percentile and the mean are the full report's, to the last bit."""
    record, report = _run()
    judge = make_judge(limits((metric, _STATISTICS[statistic], 100.0)), _scenario())
    (outcome,) = judge.judge(record).outcomes
    assert outcome.value == getattr(getattr(report, metric), statistic)
    assert outcome.is_met == (outcome.value <= 100.0)


def test_attainment_is_that_of_the_report() -> None:
    """With classes and a percentile of each request's own gaps."""
    record, report = _run()
    judge = make_judge(ServingTargets(slo_attainment_ratio=0.5), _scenario())
    (outcome,) = judge.judge(record).outcomes
    assert outcome.metric == "slo"
    assert outcome.value == report.slo_attainment_ratio
    assert 0 < outcome.value < 1


@pytest.mark.parametrize(("tightened", "is_met"), [(1.0, True), (0.999, False)])
def test_margins_are_on_the_side_of_the_verdict(tightened: float, is_met: bool) -> None:
    """A figure at its limit meets it; beyond it the margin is above 0, of both kinds of target."""
    record, report = _run()
    latency = limits(("ttft_ms", 99, report.ttft_ms.p99 * tightened))
    share = ServingTargets(slo_attainment_ratio=report.slo_attainment_ratio / tightened)
    verdicts = [make_judge(targets, _scenario()).judge(record) for targets in (latency, share)]
    assert [verdict.is_met for verdict in verdicts] == [is_met, is_met]
    assert [verdict.margin <= 0 for verdict in verdicts] == [is_met, is_met]


def test_the_worst_target_is_named() -> None:
    """The margin is the logarithm of the figure over its limit."""
    record, report = _run()
    targets = limits(("e2e_latency_ms", 50, 1e6), ("ttft_ms", 0, report.ttft_ms.mean / 2))
    verdict = make_judge(targets, _scenario()).judge(record)
    assert verdict.worst.metric == "ttft_ms"
    assert verdict.margin == pytest.approx(np.log(2))


def _turn_away(record: ServingRecord, rows: list[int], outcome: RequestOutcome) -> ServingRecord:
    """Return the record as if some requests had been turned away."""
    requests = record.requests
    columns = {name: np.array(getattr(requests, name)) for name in ("outcome", "finished_ns")}
    columns["outcome"][rows], columns["finished_ns"][rows] = outcome, -1
    return replace(record, requests=replace(requests, **columns))


@pytest.mark.parametrize("outcome", [RequestOutcome.REJECTED, RequestOutcome.LOST])
def test_who_is_turned_away_is_late(outcome: RequestOutcome) -> None:
    """A deployment that rejects two of fifty has no P99; its P90 is met by the others."""
    load = load_of(drawn_scenario(50), limits(("ttft_ms", 99, 1e6)))
    record = _turn_away(load.deployment.run(load.plan, lambda _: None), [3, 7], outcome)
    assert not load.judge.judge(record).is_met
    p90 = Judge(limits(("ttft_ms", 90, 1e6), ("e2e_latency_ms", 90, 1e6)), ())
    assert p90.judge(record).is_met


def test_what_never_fits_does_not_count() -> None:
    """Requests that are refused for their size at any rate leave latencies alone, as in reports."""
    load = load_of(drawn_scenario(50), limits(("ttft_ms", 99, 1e6)))
    record = load.deployment.run(load.plan, lambda _: None)
    refused = _turn_away(record, [3, 7], RequestOutcome.EXCEEDS_KV_CACHE)
    assert load.judge.judge(refused).is_met


def test_attainment_without_objectives_is_refused() -> None:
    """The message names what to set."""
    with pytest.raises(InvalidRequestError, match="set one, such as"):
        make_judge(ServingTargets(slo_attainment_ratio=0.9), build_scenario())


def test_outcomes_of_a_hand_made_run() -> None:
    """Requests far apart on a server of 10 steps of 10 ms: nothing waits."""
    load = load_of(drawn_scenario(20), limits(("ttft_ms", 50, 20.0), ("tpot_ms", 50, 9.0)))
    verdict = load.judge.judge(load.deployment.run(load.at_rate(1e-3), lambda _: None))
    expected = (
        LimitOutcome(metric="ttft_ms", percentile=50, limit=20.0, value=10.0, is_met=True),
        LimitOutcome(metric="tpot_ms", percentile=50, limit=9.0, value=10.0, is_met=False),
    )
    assert verdict.outcomes == expected


def test_the_kind_verdict_stops_the_clock() -> None:
    """Where the fourth request arrives at 150 ms, the third, which waits, has waited that long.

    A server of 10 steps of 10 ms has their first tokens at 10, 110 and 210 ms; of ten requests the
    seven unseen ones take no time.
    """
    load = load_of(drawn_scenario(10), limits(("ttft_ms", 100, 200.0), ("ttft_ms", 0, 20.0)))
    arrival_ns = np.array([0, 0, 0, *range(150, 157)]) * 1_000_000
    plan = replace(load.plan, arrival_ns=arrival_ns)
    first = load.deployment.run(take_requests(plan, np.arange(3)), lambda _: None)
    verdict = load.judge.judge_kindly(first, count_unseen(plan, 3))
    largest, mean = (outcome.value for outcome in verdict.outcomes)
    assert largest == pytest.approx(150.0)
    assert mean == pytest.approx((10 + 110 + 150) / 10)
    assert not verdict.is_met
