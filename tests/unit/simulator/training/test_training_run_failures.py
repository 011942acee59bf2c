"""The expected time of a run that fails, and the interval of checkpoints that loses least."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_simulation import simulate_run

from foretoken.simulator.training.run.draws import NUM_RUNS, draw_runs
from foretoken.simulator.training.run.failures import FailureModel

_MINUTE, _HOUR = 60.0, 3600.0
_NUM_SIMULATED = 3000
# Seldom and often, both ways to write checkpoints, an interval that leaves work over.
_CASES = [
    (FailureModel(rate_per_s=1 / 5000, restart_s=100, stall_s=20), 20_000, 600),
    (FailureModel(rate_per_s=1 / 500, restart_s=300, stall_s=30), 5_000, 400),
    (FailureModel(rate_per_s=1 / 800, restart_s=200, stall_s=5, delay_s=90), 6_000, 350),
    (FailureModel(rate_per_s=1 / 900, restart_s=0, stall_s=0, delay_s=300), 6_000, 300),
]

_models = st.builds(
    FailureModel,
    rate_per_s=st.floats(1e-7, 1e-3),
    restart_s=st.floats(0, 1000),
    stall_s=st.floats(0.01, 300),
    delay_s=st.floats(0, 300),
)


@pytest.mark.parametrize(("model", "work_s", "interval_s"), _CASES)
def test_the_expected_time_is_the_mean_of_simulated_runs(
    model: FailureModel, work_s: float, interval_s: float
) -> None:
    """Within four standard errors of a simulation that knows no formula."""
    source = np.random.default_rng(1)
    times = [simulate_run(model, work_s, interval_s, source) for _ in range(_NUM_SIMULATED)]
    error_s = statistics.stdev(times) / math.sqrt(_NUM_SIMULATED)
    expected = model.expect_run(work_s, interval_s)
    assert pytest.approx(statistics.mean(times), abs=4 * error_s) == expected.total_s


@pytest.mark.parametrize(("model", "work_s", "interval_s"), _CASES)
def test_drawn_runs_spread_as_simulated_ones_do(
    model: FailureModel, work_s: float, interval_s: float
) -> None:
    """Mean, deviation and percentiles of both agree within what so many runs can tell."""
    source = np.random.default_rng(2)
    times = sorted(simulate_run(model, work_s, interval_s, source) for _ in range(_NUM_SIMULATED))
    drawn = sorted(draw_runs(model, work_s, interval_s))
    deviation_s = statistics.stdev(times)
    assert pytest.approx(statistics.mean(times), abs=0.12 * deviation_s) == statistics.mean(drawn)
    assert pytest.approx(deviation_s, rel=0.12) == statistics.stdev(drawn)
    for share in (0.1, 0.5, 0.9):
        simulated_s = times[int(share * _NUM_SIMULATED)]
        assert pytest.approx(simulated_s, abs=0.2 * deviation_s) == drawn[int(share * NUM_RUNS)]


def test_many_failures_are_drawn_from_the_limit_of_their_sum() -> None:
    """Ten thousand failures a run: the mean is the expected one, the spread a few thousandths."""
    model = FailureModel(rate_per_s=1 / 1000, restart_s=100, stall_s=10)
    drawn = draw_runs(model, 1e7, 200.0)
    expected = model.expect_run(1e7, 200.0)
    assert expected.num_failures > 10_000
    assert pytest.approx(statistics.mean(drawn), rel=1e-3) == expected.total_s
    assert 1e-4 < statistics.stdev(drawn) / expected.total_s < 1e-2


@pytest.mark.parametrize(
    ("mtbf_s", "best_s"), [(24 * _HOUR, 117), (6 * _HOUR, 57), (15 * _MINUTE, 9.1)]
)
def test_the_best_interval_is_daly_s(mtbf_s: float, best_s: float) -> None:
    """Daly, 2006, figures 3 to 5: 117, 57 and 9.1 minutes, with 5 minutes for a checkpoint."""
    model = FailureModel(rate_per_s=1 / mtbf_s, restart_s=10 * _MINUTE, stall_s=5 * _MINUTE)
    assert pytest.approx(best_s, rel=0.01) == model.best_interval() / _MINUTE


def test_the_best_interval_nears_young_s_where_failures_are_rare() -> None:
    """Young, 1974: the root of twice the checkpoint's time by the time between failures."""
    model = FailureModel(rate_per_s=1e-9, stall_s=10)
    assert pytest.approx(math.sqrt(2 * 10 / 1e-9), rel=1e-3) == model.best_interval()


def _time_over_work(model: FailureModel, interval_s: float) -> float:
    """Return what more training takes over its length, without what a run waits for at its end."""
    first, second = (model.expect_run(count * interval_s, interval_s) for count in (10, 20))
    return (second.total_s - first.total_s) / (10 * interval_s)


@given(_models, st.floats(0.05, 20))
def test_no_interval_loses_less_than_the_best(model: FailureModel, factor: float) -> None:
    best_s = model.best_interval()
    other_s = max(best_s * factor, model.shortest_s)
    if not model.can_end(other_s):
        return
    best, other = (_time_over_work(model, interval_s) for interval_s in (best_s, other_s))
    assert best <= other * (1 + 1e-6)


@given(_models, st.floats(1e3, 1e7), st.floats(1, 3600))
def test_parts_are_not_negative_and_failures_come_at_their_rate(
    model: FailureModel, work_s: float, interval_s: float
) -> None:
    """All of the time can fail, so the failures are the rate by the whole of it."""
    if not model.can_end(interval_s):
        return
    run = model.expect_run(work_s, interval_s)
    assert min(run.work_s, run.checkpoint_s, run.repeated_s, run.restart_s) >= 0
    assert pytest.approx(model.rate_per_s * run.total_s, rel=1e-6) == run.num_failures


def test_nothing_is_lost_where_nothing_fails() -> None:
    """But the checkpoint at the end, and those that are asked for."""
    model = FailureModel(stall_s=10)
    assert model.best_interval() == math.inf
    assert model.expect_run(1000, math.inf).total_s == 1010
    assert model.expect_run(1000, 300).total_s == 1040
    assert set(draw_runs(model, 1000, 300)) == {1040.0}


def test_a_run_that_fails_too_often_never_ends() -> None:
    model = FailureModel(rate_per_s=1.0, restart_s=5, stall_s=1)
    assert not model.can_end(60)
    assert model.can_end(1)
