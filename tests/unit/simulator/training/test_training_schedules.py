"""The tables of the pipeline schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.simulator.steps.pipelines.schedule import RankOrder, all_schedules, find_schedule

_ranks = st.integers(1, 8)
_micro_batches = st.integers(1, 20)
_ENDS = ("backward", "backward_weight")


def _show(order: RankOrder) -> str:
    letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    slots = [[f"{letters[item.kind]}{item.micro_batch}" for item in slot] for slot in order]
    return " ".join("+".join(slot) for slot in slots)


def _in_flight(order: RankOrder) -> int:
    """Return the most chunks times micro batches whose activations a rank holds at once."""
    held = peak = 0
    for slot in order:
        held += sum(item.kind == "forward" for item in slot)
        peak = max(peak, held)
        held -= sum(item.kind in _ENDS for item in slot)
    return peak


def _chunks(schedule: str, num_ranks: int, num_micro_batches: int) -> list[set[int]]:
    orders = find_schedule(schedule).orders(num_ranks, num_micro_batches, 2)
    return [{item.chunk for slot in order for item in slot} for order in orders]


def test_the_schedules_are_those_of_the_papers() -> None:
    expected = {
        *("gpipe", "one_f_one_b", "interleaved"),
        *("zero_bubble_h1", "zero_bubble_v", "dualpipe"),
    }
    assert expected == set(all_schedules())


def test_one_f_one_b_is_drawn_as_in_its_paper() -> None:
    first, second, third = find_schedule("one_f_one_b").orders(3, 4, 1)
    assert _show(first) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _show(second) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert _show(third) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_zero_bubble_h1_puts_off_more_weight_gradients_on_later_ranks() -> None:
    first, last = find_schedule("zero_bubble_h1").orders(2, 3, 1)
    assert _show(first) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert _show(last) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"


def test_dualpipe_overlaps_both_directions_where_they_meet() -> None:
    first, last = find_schedule("dualpipe").orders(2, 4, 1)
    assert _show(first) == "F0 F2 F1 B2 F3+B0 B3 I1 W1"
    assert _show(last) == "F2 F0 F3 B0 F1+B2 B1 I3 W3"


def test_ranks_hold_the_chunks_that_the_papers_say() -> None:
    assert [{0, 4}, {1, 5}, {2, 6}, {3, 7}] == _chunks("interleaved", 4, 8)
    assert [{0, 7}, {1, 6}, {2, 5}, {3, 4}] == _chunks("zero_bubble_v", 4, 8)
    assert [{0, 3}, {1, 2}, {2, 1}, {3, 0}] == _chunks("dualpipe", 4, 8)


@given(_ranks, _micro_batches)
def test_one_f_one_b_and_gpipe_hold_what_is_known(p: int, m: int) -> None:
    one = find_schedule("one_f_one_b").orders(p, m, 1)
    assert [min(p - rank, m) for rank in range(p)] == [_in_flight(order) for order in one]
    assert [m] * p == [_in_flight(order) for order in find_schedule("gpipe").orders(p, m, 1)]


@given(_ranks, st.integers(1, 4), st.integers(2, 4))
def test_interleaved_holds_what_is_known(p: int, num_groups: int, v: int) -> None:
    """2 (p - rank - 1) + (v - 1) p + 1 chunks. Source: Megatron-LM's warm-up."""
    m = num_groups * p
    orders = find_schedule("interleaved").orders(p, m, v)
    expected = [min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) for rank in range(p)]
    assert expected == [_in_flight(order) for order in orders]


@given(_ranks, _micro_batches)
def test_zero_bubble_h1_holds_no_more_than_the_first_rank_of_one_f_one_b(p: int, m: int) -> None:
    orders = find_schedule("zero_bubble_h1").orders(p, m, 1)
    assert [min(p, m)] * p == [_in_flight(order) for order in orders]


@given(_ranks, _micro_batches)
def test_zero_bubble_v_holds_no_more_than_one_f_one_b(p: int, m: int) -> None:
    """Two chunks per rank are a stage of 1F1B, which holds p of them."""
    orders = find_schedule("zero_bubble_v").orders(p, m, 2)
    assert max(map(_in_flight, orders)) <= 2 * p
    larger = find_schedule("zero_bubble_v").orders(p, m + 2 * p, 2)
    assert [2 * p] * p == [_in_flight(order) for order in larger]


@given(st.integers(1, 5), st.integers(0, 6))
def test_dualpipe_holds_one_micro_batch_more_than_ranks(half: int, more: int) -> None:
    """Source: DeepSeek-V3 Technical Report, table 2: activations of PP + 1."""
    p = 2 * half
    orders = find_schedule("dualpipe").orders(p, 2 * p + 2 * more, 1)
    assert p + 1 == max(map(_in_flight, orders))


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_micro_batches", "problem"),
    [
        ("interleaved", 4, 6, "groups of pp"),
        ("dualpipe", 3, 12, "even pp"),
        ("dualpipe", 4, 6, "at least 8"),
        ("dualpipe", 4, 9, "even number"),
    ],
)
def test_numbers_that_do_not_suit_are_refused(
    schedule: str, num_ranks: int, num_micro_batches: int, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        find_schedule(schedule).orders(num_ranks, num_micro_batches, 2)


def test_an_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UnknownPluginError, match="one_f_one_b"):
        find_schedule("1f1b")
