"""The pipeline simulator and the orders of its schedules."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.simulator.training.pipeline import PipelineRun, StageTimes, run_pipeline
from foretoken.simulator.training.schedule import (
    all_schedules,
    count_in_flight,
    find_schedule,
)

_stages = st.integers(1, 8)
_micro_batches = st.integers(1, 12)
_times = st.floats(1.0, 100.0)
_schedules = st.sampled_from(sorted(all_schedules()))


def _run(
    schedule: str,
    num_stages: int,
    num_micro_batches: int,
    times: StageTimes,
    *,
    duplex: bool = True,
) -> PipelineRun:
    orders = find_schedule(schedule).orders(num_stages, num_micro_batches)
    return run_pipeline(orders, [times] * num_stages, has_duplex_links=duplex)


@given(_schedules, _stages, _micro_batches, _times, _times)
def test_the_bubble_of_equal_stages_is_the_known_one(
    schedule: str, pp: int, num_micro_batches: int, forward_us: float, backward_us: float
) -> None:
    """Idle over total is (pp - 1) / (m + pp - 1) without transfers. Source: PipeDream, GPipe."""
    times = StageTimes(forward_us=forward_us, backward_us=backward_us)
    run = _run(schedule, pp, num_micro_batches, times)
    busy_us = num_micro_batches * (forward_us + backward_us)
    bubble = 1 - busy_us / max(run.stage_ends_us)
    assert pytest.approx((pp - 1) / (num_micro_batches + pp - 1), abs=1e-9) == bubble


@given(_stages, _micro_batches)
def test_one_f_one_b_holds_as_many_micro_batches_as_stages_follow(pp: int, m: int) -> None:
    orders = find_schedule("one_f_one_b").orders(pp, m)
    assert [min(pp - stage, m) for stage in range(pp)] == [count_in_flight(o) for o in orders]
    assert [m] * pp == [count_in_flight(o) for o in find_schedule("gpipe").orders(pp, m)]


@given(_schedules, _stages, _micro_batches)
def test_every_stage_runs_every_micro_batch_both_ways_once(schedule: str, pp: int, m: int) -> None:
    for order in find_schedule(schedule).orders(pp, m):
        expected = sorted((kind, index) for kind in ("backward", "forward") for index in range(m))
        assert expected == sorted(order)


@given(_schedules, _stages, _micro_batches, _times, _times, st.booleans())
def test_no_pass_begins_before_what_it_needs(
    schedule: str, pp: int, m: int, forward_us: float, send_us: float, duplex: bool
) -> None:
    times = StageTimes(
        forward_us=forward_us,
        backward_us=2 * forward_us,
        send_forward_us=send_us,
        send_backward_us=send_us,
    )
    run = _run(schedule, pp, m, times, duplex=duplex)
    spans = {(span.kind, span.stage, span.micro_batch): span for span in run.spans}
    for (kind, stage, micro_batch), span in spans.items():
        before = stage - 1 if kind == "forward" else stage + 1
        needed = spans.get((f"send_{kind}", before, micro_batch))
        if needed is not None:
            assert needed.end_us <= span.start_us + 1e-6
            made = spans[kind, before, micro_batch]
            assert made.end_us <= needed.start_us + 1e-6
    num_transfers = sum(kind.startswith("send") for kind, _, _ in spans)
    assert 2 * m * (pp - 1) == num_transfers


@given(_schedules, _stages, _micro_batches, _times, st.booleans())
def test_a_stage_does_one_pass_at_a_time(
    schedule: str, pp: int, m: int, send_us: float, duplex: bool
) -> None:
    times = StageTimes(
        forward_us=10.0, backward_us=20.0, send_forward_us=send_us, send_backward_us=send_us
    )
    run = _run(schedule, pp, m, times, duplex=duplex)
    for stage in range(pp):
        passes = [s for s in run.spans if s.stage == stage and not s.kind.startswith("send")]
        for first, second in itertools.pairwise(passes):
            assert first.end_us <= second.start_us
    for end_us, transfer_us in zip(run.stage_ends_us, run.transfers_us, strict=True):
        assert m * 30.0 + transfer_us <= end_us + 1e-6


def test_a_transfer_waits_for_both_ends() -> None:
    """Worked by hand: two stages, one micro batch; the receiver is there first, both ways."""
    times = [
        StageTimes(forward_us=10.0, backward_us=20.0, send_forward_us=1.0),
        StageTimes(forward_us=5.0, backward_us=7.0, send_backward_us=2.0),
    ]
    run = run_pipeline(find_schedule("one_f_one_b").orders(2, 1), times)
    starts = {(s.kind, s.stage): (s.start_us, s.end_us) for s in run.spans}
    expected = {
        ("forward", 0): (0.0, 10.0),
        ("send_forward", 0): (10.0, 11.0),
        ("forward", 1): (11.0, 16.0),
        ("backward", 1): (16.0, 23.0),
        ("send_backward", 1): (23.0, 25.0),
        ("backward", 0): (25.0, 45.0),
    }
    assert expected == starts
    assert (3.0, 3.0) == run.transfers_us


def test_links_that_carry_one_direction_at_a_time_cost_more() -> None:
    times = StageTimes(forward_us=10.0, backward_us=20.0, send_forward_us=4.0, send_backward_us=4.0)
    both = _run("one_f_one_b", 4, 8, times)
    one = _run("one_f_one_b", 4, 8, times, duplex=False)
    assert max(both.stage_ends_us) < max(one.stage_ends_us)


def test_a_schedule_that_can_never_end_is_refused() -> None:
    """The first stage wants a gradient before it has sent anything."""
    orders = ((("backward", 0), ("forward", 0)), (("forward", 0), ("backward", 0)))
    with pytest.raises(InvalidRequestError, match="wait for each other"):
        run_pipeline(orders, [StageTimes(forward_us=1.0, backward_us=1.0)] * 2)  # type: ignore[arg-type]


def test_an_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UnknownPluginError, match="one_f_one_b"):
        find_schedule("1f1b")
