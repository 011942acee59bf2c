"""What a rank waits for after its last backward passes: the same rule for one case or many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.simulator.steps.chunks import (
    NEVER,
    Buckets,
    LastPass,
    gather_during,
    reduce_early,
)

_us = st.floats(0.5, 100)
# Start and length of a pass, what it leaves, and buckets: their time and how many of them.
_case = st.tuples(_us, _us, st.one_of(st.just(0.0), _us), _us, st.integers(0, 4))


def _last(cases: list[tuple[float, float, float, float, int]]) -> LastPass:
    start_us, time_us, left_us, bucket_us, count = map(np.array, zip(*cases, strict=True))
    return LastPass(
        start_us=start_us,
        time_us=time_us,
        hidden_us=left_us,
        left_us=left_us,
        buckets=[Buckets(bucket_us, count)],
    )


@given(st.lists(_case, min_size=1, max_size=5))
def test_a_case_ends_the_same_alone_and_among_others(
    cases: list[tuple[float, float, float, float, int]],
) -> None:
    together = reduce_early([_last(cases)], 0.0, np.zeros(len(cases)))
    for row, case in enumerate(cases):
        alone = reduce_early([_last([case])], 0.0, np.zeros(1))
        assert [float(np.ravel(us)[0]) for us in alone] == [np.ravel(us)[row] for us in together]


@pytest.mark.parametrize(
    ("bucket_us", "expected_us"),
    [
        (1, (25, 101)),  # the last one when the pass has ended
        (50, (25, 225)),  # one after the other
    ],
)
def test_buckets_are_reduced_as_shares_of_the_pass_are_done(
    bucket_us: float, expected_us: tuple[float, float]
) -> None:
    found = reduce_early([_last([(0, 100, 0, bucket_us, 4)])], 0.0, np.zeros(1))
    assert list(expected_us) == [us[0] for us in found]


def test_the_last_bucket_goes_after_what_the_pass_left() -> None:
    _, end_us = reduce_early([_last([(0, 100, 30, 5, 2)])], 0.0, np.zeros(1))
    assert [135] == list(end_us)


def test_nothing_to_reduce_never_ends() -> None:
    found = reduce_early([_last([(0, 100, 0, 5, 0)])], 0.0, np.zeros(1))
    assert [NEVER, NEVER] == [us[0] for us in found]


def test_a_gather_slows_the_forward_pass_it_hides_behind() -> None:
    found = gather_during(np.array([10.0, 40.0]), np.array([20.0, 20.0]), 1.25)
    assert pytest.approx([10 * 0.2, 25 * 0.2 + 15]) == list(found)
