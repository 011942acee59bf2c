"""Laws of the parts of a serving search, compared with brute force."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.simulator.search.pareto import pareto_front
from foretoken.simulator.search.serving.match import count_replicas, pair_replicas

_VALUES = st.integers(min_value=0, max_value=6)
_RATES = st.floats(min_value=0.01, max_value=100.0)


@given(st.lists(st.tuples(_VALUES, _VALUES, st.booleans()), max_size=30))
def test_front_is_what_nothing_beats(points: list[tuple[int, int, bool]]) -> None:
    """A point is on the front where no other that counts is as good in both, better in one."""

    def is_beaten(larger: int, smaller: int) -> bool:
        return any(
            one >= larger and two <= smaller and (one > larger or two < smaller)
            for one, two, counts in points
            if counts
        )

    expected = [counts and not is_beaten(larger, smaller) for larger, smaller, counts in points]

    front = pareto_front(
        np.array([point[0] for point in points], dtype=np.float64),
        np.array([point[1] for point in points], dtype=np.float64),
        np.array([point[2] for point in points], dtype=np.bool_),
    )

    assert front.tolist() == expected


@given(_RATES, st.floats(min_value=0.1, max_value=1000.0))
def test_replicas_are_the_fewest_that_carry_the_target(rate: float, target: float) -> None:
    """So many carry it, one fewer does not."""
    num = int(count_replicas(np.array([rate]), 1, 8, target)[0])

    assert num * rate >= target * (1 - 1e-8)
    assert num == 1 or (num - 1) * rate < target


@given(
    _RATES,
    _RATES,
    st.integers(min_value=1, max_value=3),
    st.integers(min_value=1, max_value=3),
    st.integers(min_value=2, max_value=12),
    st.booleans(),
)
def test_pairs_carry_most_for_each_device_that_counts(
    prefill: float, decode: float, first: int, second: int, most: int, counts_idle: bool
) -> None:
    """No pair that fits carries more for each device that counts than the one chosen."""

    def each(one: int, two: int) -> float:
        counted = most if counts_idle else one * first + two * second
        return min(one * prefill, two * decode) / counted

    fitting = [
        (one, two)
        for one, two in product(range(1, most + 1), repeat=2)
        if one * first + two * second <= most
    ]

    chosen = pair_replicas(
        np.array([prefill]),
        np.array([decode]),
        (np.array([first]), np.array([second])),
        most,
        counts_idle=counts_idle,
    )

    pair = int(chosen[0][0]), int(chosen[1][0])
    if fitting:
        assert pair in fitting
        assert each(*pair) >= max(each(*other) for other in fitting) * (1 - 1e-6)
    else:
        assert pair == (1, 1)


def test_a_pair_that_leaves_devices_idle_gives_way_to_one_that_uses_all() -> None:
    """Of 8 devices 2 + 4 carry most for each, 3 + 5 a quarter more in all."""
    rates = np.array([10.0]), np.array([5.0])
    devices = np.array([1]), np.array([1])

    used, owned = (
        pair_replicas(*rates, devices, 8, counts_idle=counts_idle) for counts_idle in (False, True)
    )

    assert [int(num[0]) for num in used] == [2, 4]
    assert [int(num[0]) for num in owned] == [3, 5]
