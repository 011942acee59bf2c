"""How rows are shared out among experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.expert_rows import NAMED_ROUTINGS, share_rows


@given(
    num_groups=st.integers(1, 300),
    rows_per_group=st.floats(1.0, 300.0),
    routing=st.sampled_from(["", *NAMED_ROUTINGS]),
    room=st.floats(0.0, 1.0),
)
def test_every_row_goes_to_an_expert_and_every_expert_gets_one(
    num_groups: int, rows_per_group: float, routing: str, room: float
) -> None:
    num_rows = int(num_groups * rows_per_group)
    least = -(-num_rows // num_groups)
    cap = least + int(room * (num_rows - least))
    sizes = share_rows(num_rows, num_groups, routing, cap)
    assert (num_groups, num_rows) == (len(sizes), sum(sizes))
    assert 1 <= min(sizes)
    assert max(sizes) <= cap


def test_even_shares_differ_by_one_row_and_the_larger_come_first() -> None:
    assert (3, 3, 2, 2) == share_rows(10, 4)
    assert share_rows(10, 4) == share_rows(10, 4, "balanced")


def test_a_steeper_law_gives_more_to_the_busiest_expert_and_less_to_the_typical() -> None:
    even, mild, steep = (
        sorted(share_rows(8192, 128, routing))
        for routing in ("", "power_law_1.01", "power_law_1.2")
    )
    assert even[-1] < mild[-1] < steep[-1]
    assert even[64] > mild[64] > steep[64]


def test_the_same_dimensions_always_mean_the_same_sizes() -> None:
    first = share_rows(500, 16, "power_law_1.2")
    share_rows.cache_clear()
    assert first == share_rows(500, 16, "power_law_1.2")
    assert list(first) != sorted(first)


@pytest.mark.parametrize(("num_rows", "num_groups", "cap"), [(3, 4, 0), (9, 2, 4)])
def test_too_few_rows_or_more_than_experts_may_get_are_refused(
    num_rows: int, num_groups: int, cap: int
) -> None:
    with pytest.raises(InvalidRequestError, match="cannot reach"):
        share_rows(num_rows, num_groups, cap=cap)
