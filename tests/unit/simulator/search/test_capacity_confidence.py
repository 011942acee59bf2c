from math import exp, log

import numpy as np
import pytest
from capacity_fakes import drawn_scenario, limits, load_of

from foretoken.domain.requests.search import LimitOutcome
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.search.capacity.bracket import (
    find_crossing,
    fit_curve,
    rescale_width,
    sampling_width,
    student_quantile,
)
from foretoken.simulator.search.capacity.load_search import LoadSearch
from foretoken.simulator.search.capacity.probe import Probe, Verdict, resample_loads, take_blocks
from foretoken.simulator.search.capacity.rate import estimate_service_rps
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.workload.request_plan import plan_requests


def _probes(*points: tuple[float, float]) -> list[Probe]:
    outcome = LimitOutcome(metric="ttft_ms")
    return [
        Probe(exp(at), Verdict(outcomes=(outcome,), margins=(margin,)), 1, 0.0, False)
        for at, margin in points
    ]


@pytest.mark.parametrize(
    ("confidence", "num_degrees", "expected"),
    [(0.95, 1, 12.706), (0.95, 3, 3.182), (0.95, 7, 2.365), (0.90, 4, 2.132), (0.99, 10, 3.169)],
)
def test_student_quantiles(confidence: float, num_degrees: int, expected: float) -> None:
    """As printed in tables of the distribution."""
    assert student_quantile(confidence, num_degrees) == pytest.approx(expected, abs=5e-4)


def test_sampling_width_of_two_draws() -> None:
    """Their standard deviation times Student's t of one degree of freedom."""
    assert sampling_width([0.0, 0.2], 2, 0.95) == pytest.approx(12.706 * 0.1 * 2**0.5, rel=1e-4)
    assert sampling_width([], 8, 0.95) == 0


def test_predictor_width_at_other_confidence() -> None:
    """Its 90 % become 95 % by the ratio of the normal quantiles, 1.960 / 1.645."""
    assert rescale_width(0.1, 0.9) == pytest.approx(0.1)
    assert rescale_width(0.1, 0.95) == pytest.approx(0.1 * 1.95996 / 1.64485, rel=1e-4)


@pytest.mark.parametrize("shift", [-0.4, -0.05, 0.0, 0.02, 0.3])
def test_a_shifted_load_is_found_in_two_runs(shift: float) -> None:
    """Where its margin is the search's own, moved along the rate, the first run says it all."""

    def margin(at: float) -> float:
        return float(np.interp(at, [0, 1, 1.5, 2], [-3, -0.5, 0.5, 4]))

    curve = fit_curve(_probes(*((at, margin(at)) for at in (0.0, 1.0, 1.5, 2.0))))
    runs: list[float] = []

    def margin_at(at: float) -> float:
        runs.append(at)
        return margin(at - shift)

    found = find_crossing(margin_at, curve, curve.root, 2)
    assert curve.root == pytest.approx(1.25, abs=1e-3)
    assert found == pytest.approx(1.25 + shift, abs=5e-3)
    assert len(runs) == 2


def test_curve_ascends_over_what_noise_turned_round() -> None:
    """A higher rate with a lower margin does not make two roots."""
    curve = fit_curve(_probes((0.0, -1.0), (0.5, 0.1), (0.6, -0.05), (1.0, 2.0)))
    assert (np.diff(curve.margin) > 0).all()
    assert 0.0 < curve.root < 0.6


def test_half_of_a_trace_closes_the_gaps() -> None:
    """Blocks of two requests each: the second follows the first as if nothing had been between."""
    seconds = np.array([0, 1, 10, 12, 30, 31, 40, 44]) * 1_000_000_000
    plan = plan_requests(seconds, np.arange(1, 9), np.ones(8, dtype=np.int64))
    half = take_blocks(plan, np.array([1, 3]), 4)
    # Block 1 lasts from 10 s to 30 s, so block 3, from 40 s on, begins 20 s after it.
    assert (half.arrival_ns / 1e9).tolist() == [0, 2, 20, 24]
    assert half.num_prefill_tokens.tolist() == [3, 4, 7, 8]


def test_halves_of_a_trace_are_pairs() -> None:
    """Every request is in one half of a pair; a trace too short to be cut has none."""
    rows = [
        Request(arrival_s=at * 0.2, num_prefill_tokens=8, num_decode_tokens=at % 5 + 1)
        for at in range(160)
    ]
    workload = WorkloadSpec(arrival="trace", trace_requests=tuple(rows))
    scenario = drawn_scenario(1)
    scenario = type(scenario)(model=scenario.model, device="a30", workload=workload)
    load = load_of(scenario, limits(("ttft_ms", 90, 100.0)))
    resamples = resample_loads(scenario, load)
    assert resamples.num_independent == 8
    assert [each.plan.num_requests for each in resamples.loads] == [80] * 16
    assert all(each.plan_rps == pytest.approx(5.0, rel=0.1) for each in resamples.loads)


def test_interval_is_as_wide_as_other_seeds_scatter() -> None:
    """It is as wide as whole searches with the next eight seeds scatter."""
    targets = limits(("e2e_latency_ms", 90, 400.0))
    loads = [load_of(drawn_scenario(150, seed), targets) for seed in range(9)]
    search = LoadSearch(loads[0], 0.02, 0.95, InlineContext())
    bracket = search.find_bracket(6.0)
    assert bracket.met is not None
    assert bracket.missed is not None
    resamples = resample_loads(drawn_scenario(150), loads[0])
    interval = search.find_interval(bracket.met, bracket.missed, resamples, {})
    assert interval.low_rps == interval.sampling_low_rps < bracket.met.rate_rps
    assert interval.high_rps == interval.sampling_high_rps > bracket.missed.rate_rps
    rates = []
    for load in loads[1:]:
        met = LoadSearch(load, 0.02, 0.95, InlineContext()).find_bracket(6.0).met
        assert met is not None
        rates.append(met.rate_rps)
    spread = log(interval.high_rps / interval.low_rps) / 2
    assert spread == pytest.approx(
        student_quantile(0.95, 7) * np.std(np.log(rates), ddof=1), rel=0.4
    )


def test_service_rate_of_a_server() -> None:
    """A prompt in one step of 10 ms and ten answers of 10 ms each: 9.1 requests/s; four, 4 x."""
    load = load_of(drawn_scenario(10), limits(("ttft_ms", 90, 100.0)))
    tables = flat_tables(10_000.0, 0.0)
    setup = load.deployment.setup  # type: ignore[attr-defined]
    assert estimate_service_rps(setup, [tables], load.plan) == pytest.approx(1 / 0.11)
