"""The pipeline simulator, worked by hand on small cases."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.results.training_report import SPAN_KINDS
from foretoken.simulator.steps.pipelines.events import (
    ChunkTimes,
    LinkRules,
    Pipeline,
    PipelineRun,
    run_pipeline,
)
from foretoken.simulator.steps.pipelines.schedule import Pass, RankOrder, find_schedule

_RENDEZVOUS, _BUFFERED = LinkRules(), LinkRules(transfers="buffered")
# (kind, rank, micro batch) -> (start, end)
_Spans = dict[tuple[str, int, int], tuple[float, float]]


def _spans(run: PipelineRun) -> _Spans:
    spans = run.spans
    return {
        (SPAN_KINDS[kind], int(stage), int(micro_batch)): (float(start), float(end))
        for kind, stage, micro_batch, start, end in zip(
            spans.kind, spans.stage, spans.micro_batch, spans.start_us, spans.end_us, strict=True
        )
    }


def _times(num_chunks: int, **changes: Any) -> list[ChunkTimes]:
    times = {"forward_us": 10.0, "backward_input_us": 12.0, "backward_weight_us": 8.0, **changes}
    return [ChunkTimes(**times)] * num_chunks


def _run(
    schedule: str, num_ranks: int, num_micro_batches: int, times: Sequence[ChunkTimes], **rules: Any
) -> PipelineRun:
    orders = find_schedule(schedule).orders(num_ranks, num_micro_batches, len(times) // num_ranks)
    return run_pipeline(orders, times, LinkRules(**rules))


def test_a_rendezvous_waits_for_both_ends() -> None:
    """Two ranks, one micro batch; the receiver is there first, both ways."""
    times = [
        ChunkTimes(forward_us=10.0, backward_input_us=20.0, send_forward_us=1.0),
        ChunkTimes(forward_us=5.0, backward_input_us=7.0, send_backward_us=2.0),
    ]
    run = _run("one_f_one_b", 2, 1, times)
    expected = {
        ("forward", 0, 0): (0.0, 10.0),
        ("send_forward", 0, 0): (10.0, 11.0),
        ("forward", 1, 0): (11.0, 16.0),
        ("backward", 1, 0): (16.0, 23.0),
        ("send_backward", 1, 0): (23.0, 25.0),
        ("backward", 0, 0): (25.0, 45.0),
    }
    assert expected == _spans(run)
    assert (3.0, 3.0) == run.transfers_us
    assert (30.0, 12.0) == run.busy_us
    assert (45.0, 25.0) == run.rank_ends_us
    assert (25.0, 16.0) == run.last_backward_start_us


def test_a_rendezvous_holds_the_sender_while_the_receiver_computes() -> None:
    """The second rank takes longer, so the first cannot get rid of its second output."""
    times = [
        ChunkTimes(forward_us=1.0, backward_input_us=1.0, send_forward_us=2.0),
        ChunkTimes(forward_us=10.0, backward_input_us=10.0, send_backward_us=2.0),
    ]
    held = _spans(_run("gpipe", 2, 3, times))
    free = _spans(_run("gpipe", 2, 3, times, transfers="buffered"))
    assert (15.0, 16.0) == held["forward", 0, 2]
    assert (2.0, 3.0) == free["forward", 0, 2]
    assert (13.0, 15.0) == held["send_forward", 0, 1]
    assert [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0)] == [free["send_forward", 0, i] for i in range(3)]


def test_links_of_one_direction_carry_the_gradient_first() -> None:
    """The first rank offers an activation and wants a gradient: one exchange."""
    times = _times(2, send_forward_us=3.0, send_backward_us=4.0)
    both = _spans(_run("one_f_one_b", 2, 2, times))
    one = _spans(_run("one_f_one_b", 2, 2, times, has_duplex_links=False))
    assert ((43.0, 46.0), (43.0, 47.0)) == (both["send_forward", 0, 1], both["send_backward", 1, 0])
    assert ((47.0, 50.0), (43.0, 47.0)) == (one["send_forward", 0, 1], one["send_backward", 1, 0])
    assert (47.0, 50.0) == (both["backward", 0, 0][0], one["backward", 0, 0][0])


def test_chunks_on_one_rank_send_nothing_to_each_other() -> None:
    times = _times(2, send_forward_us=3.0, send_backward_us=4.0)
    run = _run("interleaved", 1, 2, times)
    assert {"forward", "backward"} == {SPAN_KINDS[kind] for kind in run.spans.kind}
    assert ((120.0,), (0.0,)) == (run.rank_ends_us, run.transfers_us)


def test_the_first_and_the_last_backward_pass_of_a_chunk_may_differ() -> None:
    times = _times(1, first_backward_us=17.0, last_backward_us=26.0)
    assert (3 * 30.0 - 3.0 + 6.0,) == _run("gpipe", 1, 3, times).rank_ends_us
    spans = _spans(_run("zero_bubble_h1", 1, 3, times))
    weights = [spans["backward_weight", 0, index] for index in range(3)]
    assert [5.0, 8.0, 14.0] == [end - start for start, end in weights]


def test_two_passes_of_a_slot_take_what_they_take_together() -> None:
    orders: tuple[RankOrder, ...] = (
        (
            (Pass("forward", 0, 0),),
            (Pass("forward", 1, 0), Pass("backward", 0, 0)),
            (Pass("backward", 1, 0),),
        ),
    )
    together = run_pipeline(orders, _times(1, overlapped_us={("backward", 0): 25.0}), _RENDEZVOUS)
    apart = run_pipeline(orders, _times(1), _RENDEZVOUS)
    assert ((55.0,), (60.0,)) == (together.rank_ends_us, apart.rank_ends_us)
    spans = _spans(together)
    assert {(10.0, 35.0)} == {spans["forward", 0, 1], spans["backward", 0, 0]}
    assert (35.0,) == together.last_backward_start_us


def test_samples_are_columns() -> None:
    times = _times(2, forward_us=np.array([10.0, 20.0, 5.0]), send_forward_us=1.0)
    run = _run("one_f_one_b", 2, 3, times)
    singles = [
        _run("one_f_one_b", 2, 3, _times(2, forward_us=forward_us, send_forward_us=1.0))
        for forward_us in (10.0, 20.0, 5.0)
    ]
    for rank in range(2):
        assert [single.rank_ends_us[rank] for single in singles] == list(
            np.asarray(run.rank_ends_us[rank])
        )
    assert _spans(singles[0]) == _spans(run)


def test_a_pipeline_runs_again_with_other_times() -> None:
    pipeline = Pipeline(find_schedule("interleaved").orders(2, 4, 2), _RENDEZVOUS)
    slow, fast = _times(4, send_forward_us=3.0), _times(4)
    found = [max(pipeline.run(times).rank_ends_us) for times in (slow, fast, slow)]
    expected = [max(_run("interleaved", 2, 4, times).rank_ends_us) for times in (slow, fast, slow)]
    assert expected == found


@pytest.mark.parametrize("rules", [_RENDEZVOUS, _BUFFERED])
def test_a_schedule_that_can_never_end_is_refused(rules: LinkRules) -> None:
    """The first rank wants a gradient before it has sent anything."""
    orders: tuple[RankOrder, ...] = (
        ((Pass("backward", 0, 0),), (Pass("forward", 0, 0),)),
        ((Pass("forward", 0, 1),), (Pass("backward", 0, 1),)),
    )
    with pytest.raises(InvalidRequestError, match="wait for each other"):
        run_pipeline(orders, _times(2), rules)
    halves: tuple[RankOrder, ...] = (
        ((Pass("backward_input", 0, 0),), (Pass("forward", 0, 0),)),
        ((Pass("forward", 0, 1),), (Pass("backward_input", 0, 1),)),
    )
    with pytest.raises(InvalidRequestError, match="wait for each other"):
        run_pipeline(halves, _times(2), rules)


def test_a_rank_that_needs_its_own_later_output_is_refused() -> None:
    orders: tuple[RankOrder, ...] = (((Pass("forward", 0, 1),), (Pass("forward", 0, 0),)),)
    with pytest.raises(InvalidRequestError, match="before what it needs"):
        run_pipeline(orders, _times(2), _RENDEZVOUS)
