from collections.abc import Callable

import numpy as np
import pytest
from capacity_fakes import drawn_scenario, limits, load_of
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.requests.search import LimitOutcome
from foretoken.simulator.search.capacity.bracket import RateGrid, find_bracket
from foretoken.simulator.search.capacity.load_search import LoadSearch
from foretoken.simulator.search.capacity.probe import Probe, Verdict, run_probe
from foretoken.simulator.search.context import InlineContext

_GRID = RateGrid(0.02)


def _probe(rate_rps: float, margin: float, *, is_cut_short: bool = False) -> Probe:
    outcome = LimitOutcome(metric="ttft_ms", limit=1.0, value=1.0 + margin, is_met=margin <= 0)
    return Probe(rate_rps, Verdict(outcomes=(outcome,), margins=(margin,)), 1, 0.0, is_cut_short)


def _runs(margin: Callable[[float], float], tried: list[float]) -> Callable[[float, bool], Probe]:
    def run(rate_rps: float, may_cut: bool) -> Probe:
        tried.append(rate_rps)
        value = margin(rate_rps)
        return _probe(rate_rps, value, is_cut_short=may_cut and value > 1)

    return run


@given(
    root=st.floats(0.02, 500),
    guess=st.floats(0.05, 200),
    steepness=st.floats(0.05, 30),
    bend=st.floats(0.2, 3),
)
def test_bracket_is_the_grid_s_own_around_the_root(
    root: float, guess: float, steepness: float, bend: float
) -> None:
    """Of a margin that rises with the rate the highest rate of the grid is found, in few runs."""

    def margin(rate_rps: float) -> float:
        distance = steepness * np.log(rate_rps / root)
        return float(np.sign(distance) * abs(distance) ** bend)

    tried: list[float] = []
    bracket = find_bracket(_runs(margin, tried), guess, 0.0, _GRID)
    expected = _GRID.index_below(root)
    lowest = _GRID.index_below(guess * 0.001)
    if lowest <= expected < _GRID.index_below(guess * 1000):
        assert bracket.met is not None
        assert bracket.missed is not None
        found = (bracket.met.rate_rps, bracket.missed.rate_rps)
        assert found == (_GRID.rate(expected), _GRID.rate(expected + 1))
    assert len(tried) <= 40


@given(rate=st.floats(1e-4, 1e5))
def test_grid_rounds_down(rate: float) -> None:
    """The rate of an index is at most the one asked for, that of the next is above."""
    index = _GRID.index_below(rate)
    assert _GRID.rate(index) <= rate < _GRID.rate(index + 1)


def test_no_rate_above_the_highest_is_tried() -> None:
    """Where it meets the targets it is the answer, and nothing misses."""
    tried: list[float] = []
    bracket = find_bracket(_runs(lambda _: -1.0, tried), 8.0, 10.0, _GRID)
    assert bracket.missed is None
    assert bracket.met is not None
    assert bracket.met.rate_rps == _GRID.rate(_GRID.index_below(10.0))
    assert max(tried) <= 10.0


def test_targets_that_nothing_meets() -> None:
    """A thousandth of the guess is tried last."""
    tried: list[float] = []
    bracket = find_bracket(_runs(lambda _: 0.5, tried), 8.0, 0.0, _GRID)
    assert bracket.met is None
    assert min(tried) == pytest.approx(0.008, rel=0.03)


def _sojourns_ms(arrival_s: np.ndarray, service_s: float) -> np.ndarray:
    """Return the times in a single server, first come first served (Lindley's recursion)."""
    ends: list[float] = []
    for arrival in arrival_s:
        ends.append(max(arrival, ends[-1] if ends else 0.0) + service_s)
    return (np.array(ends) - arrival_s) * 1e3


@pytest.mark.parametrize(("percentile", "limit_ms"), [(50, 120.0), (90, 400.0), (99, 700.0)])
def test_single_server_against_a_scan(percentile: float, limit_ms: float) -> None:
    """The answer is the highest rate of the grid at which Lindley's recursion meets the limit."""
    scenario = drawn_scenario(200, seed=3)
    load = load_of(scenario, limits(("e2e_latency_ms", percentile, limit_ms)))
    search = LoadSearch(load, 0.02, 0.95, InlineContext())
    bracket = search.find_bracket(5.0)
    arrival_s = load.plan.arrival_ns / 1e9
    met = []
    for index in range(_GRID.index_below(1.0), _GRID.index_below(30.0)):
        rate = _GRID.rate(index)
        # Both round arrivals to ns; the engine needs no time between requests.
        sojourns = _sojourns_ms(np.rint(arrival_s / rate * 1e9) / 1e9, 0.1)
        if np.percentile(sojourns, percentile) <= limit_ms + 1e-6:
            met.append(rate)
    assert bracket.met is not None
    assert bracket.met.rate_rps == max(met)


def test_looser_limits_never_lower_the_answer() -> None:
    """Each limit is searched on the same grid with the same requests."""
    scenario = drawn_scenario(150, seed=5)
    found = []
    for limit_ms in (130.0, 200.0, 350.0, 500.0, 1000.0):
        load = load_of(scenario, limits(("e2e_latency_ms", 95, limit_ms)))
        met = LoadSearch(load, 0.02, 0.95, InlineContext()).find_bracket(5.0).met
        assert met is not None
        found.append(met.rate_rps)
    assert found == sorted(found)
    assert len(set(found)) > 1


def test_joint_targets_are_those_of_the_tightest() -> None:
    """With two limits the answer is the lower of the two alone."""
    scenario = drawn_scenario(150, seed=5)
    singles = [("ttft_ms", 90.0, 150.0), ("e2e_latency_ms", 50.0, 160.0)]
    rates = []
    for targets in (*([single] for single in singles), singles):
        load = load_of(scenario, limits(*targets))
        met = LoadSearch(load, 0.02, 0.95, InlineContext()).find_bracket(5.0).met
        assert met is not None
        rates.append(met.rate_rps)
    assert rates[2] == min(rates[:2])


def test_a_growing_queue_is_cut_short() -> None:
    """At twice the service rate the first requests tell; the verdict is that of all of them."""
    load = load_of(drawn_scenario(2000), limits(("ttft_ms", 90, 500.0)))
    cut, _ = run_probe(load, 20.0, lambda _: None, may_cut=True)
    whole, _ = run_probe(load, 20.0, lambda _: None)
    assert (cut.is_cut_short, cut.num_requests) == (True, 500)
    assert (whole.is_cut_short, whole.num_requests) == (False, 2000)
    assert (cut.verdict.is_met, whole.verdict.is_met) == (False, False)
