"""Tests of autoscaling policies against Kubernetes' formula, by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.simulator.cluster.autoscaling import PoolObservation, find_autoscaler

_AT_ONCE = {"scale_down_window_s": "0"}


def _see(now_s: float = 0.0, **seen: float) -> PoolObservation:
    values: dict[str, float] = {"interval_s": 15.0, "num_running": 2, **seen}
    return PoolObservation(now_s=now_s, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("utilization", "wanted"),
    # Two replicas at a target of 0.5; the examples of Kubernetes' page: double the target doubles
    # them, half halves them, and a tenth more or less changes nothing.
    [(1.0, 4), (0.25, 1), (0.55, 2), (0.45, 2), (0.56, 3), (0.44, 2), (0.0, 0)],
)
def test_the_formula_of_kubernetes(utilization: float, wanted: int) -> None:
    """ceil(running x mean / target), nothing within the tolerance."""
    policy = find_autoscaler("kv_utilization")({"target": "0.5", **_AT_ONCE}, 0)
    assert wanted == policy.decide(_see(kv_utilization_ratio=utilization))


@given(
    waiting=st.integers(0, 1000),
    running=st.integers(1, 50),
    target=st.integers(1, 20),
)
def test_the_replicas_wanted_bring_the_mean_to_the_target(
    waiting: int, running: int, target: int
) -> None:
    """Spread over the replicas wanted, the queue is at most the target each, or a tenth above.

    And with one replica fewer it would be above the target, or a tenth below it.
    """
    policy = find_autoscaler("queue_length")({"target": str(target), **_AT_ONCE}, 0)
    wanted = policy.decide(_see(num_running=running, num_waiting_requests=waiting))
    is_left_alone = abs(waiting / target / running - 1) <= 0.1 + 1e-9
    assert (running if is_left_alone else math.ceil(waiting / target)) == wanted


def test_replicas_that_start_count_as_idle() -> None:
    """Two run with 20 waiting at a target of 5; with two that start there are enough."""
    seen = [_see(num_starting=starting, num_waiting_requests=20) for starting in range(4)]
    wanted = [find_autoscaler("queue_length")(_AT_ONCE, 0).decide(one) for one in seen]
    assert [4, 4, 4, 5] == wanted


def test_what_was_wanted_in_the_window_keeps_replicas() -> None:
    """Six were wanted at 30 s; until 330 s there are no fewer, then as many as since."""
    policy = find_autoscaler("queue_length")({}, 0)
    waiting = {0: 10, 30: 30, 60: 20, 90: 0, 315: 0, 330: 0, 360: 0, 390: 0}
    wanted, running = [], 2
    for now_s, num in waiting.items():
        running = policy.decide(_see(now_s, num_running=running, num_waiting_requests=num))
        wanted.append(running)
    assert [2, 6, 6, 6, 6, 4, 0, 0] == wanted


@given(
    seen=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=30),
    running=st.integers(1, 9),
    window_s=st.integers(0, 120),
)
def test_the_highest_number_of_the_window_counts(
    seen: list[tuple[int, int]], running: int, window_s: int
) -> None:
    """With one request per replica as many are wanted as wait; at first there are those running."""
    options = {"target": "1", "tolerance": "0", "scale_down_window_s": str(window_s)}
    policy = find_autoscaler("queue_length")(options, 0)
    times_s = np.cumsum([gap_s for gap_s, _ in seen])
    wanted = [(int(times_s[0]), running)]
    for now_s, (_, num) in zip(times_s.tolist(), seen, strict=True):
        wanted.append((now_s, num))
        recent = [number for at_s, number in wanted if at_s > now_s - window_s]
        decided = policy.decide(_see(now_s, num_running=running, num_waiting_requests=num))
        assert max([num, *recent]) == decided


def test_a_pool_without_running_replicas_stays_as_it_is() -> None:
    """Nothing can be said of a mean over none; those that start come."""
    policy = find_autoscaler("kv_utilization")({}, 0)
    assert 3 == policy.decide(_see(num_running=0, num_starting=3))


def test_concurrency_is_the_mean_of_the_last_minute() -> None:
    """A burst of 280 in one of four intervals is a mean of 70: one replica; at 0 s window four."""
    wanted = []
    for window_s in ("60", "0"):
        options = {"average_window_s": window_s, **_AT_ONCE}
        policy = find_autoscaler("target_concurrency")(options, 0)
        for now_s, outstanding in ((15, 0), (30, 0), (45, 0), (60, 280)):
            seen = _see(now_s, num_running=1, mean_outstanding=outstanding)
            decided = policy.decide(seen)
        wanted.append(decided)
    assert [1, 4] == wanted


def test_a_schedule_repeats() -> None:
    """Each time holds until the next, the last of a period until the first of the following."""
    options = {"times_s": "100, 200", "replicas": "8, 2", "period_s": "400"}
    policy = find_autoscaler("schedule")(options, 0)
    times_s = (0, 99, 100, 199, 200, 399, 450, 500, 650)
    assert [2, 2, 8, 8, 2, 2, 2, 8, 2] == [policy.decide(_see(now_s)) for now_s in times_s]
    once = find_autoscaler("schedule")({"times_s": "100", "replicas": "8"}, 0)
    assert [5, 8, 8] == [once.decide(_see(at, num_running=5)) for at in (0, 100, 9000)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "times_s: must be set"),
        ({"times_s": "9, 3", "replicas": "1, 2"}, "ascending"),
        ({"times_s": "1, 3", "replicas": "1"}, "one for each of 2 times"),
        ({"times_s": "1", "replicas": "1.5"}, "whole numbers"),
        ({"times_s": "-1", "replicas": "1"}, "must not be negative"),
        ({"times_s": "900", "replicas": "1", "period_s": "600"}, "period of 600 s"),
        ({"times": "900"}, "knows: times_s, replicas, period_s"),
    ],
)
def test_a_schedule_says_what_is_wrong_with_it(options: dict[str, str], problem: str) -> None:
    """A table that cannot be followed is refused when it is read."""
    with pytest.raises(InvalidRequestError, match=problem):
        find_autoscaler("schedule")(options, 0)


def test_unknown_policies_and_targets_of_nothing_are_refused() -> None:
    """The message names the nearest policy; a target is above zero, a share at most one."""
    with pytest.raises(UnknownPluginError, match="queue_length"):
        find_autoscaler("queue_lenght")
    with pytest.raises(InvalidRequestError, match="must be positive"):
        find_autoscaler("queue_length")({"target": "0"}, 0)
    with pytest.raises(InvalidRequestError, match="from 0 to 1"):
        find_autoscaler("kv_utilization")({"target": "80"}, 0)
