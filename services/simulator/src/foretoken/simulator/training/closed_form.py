"""Time of the pipeline by formula, for searches that look at many configurations.

Each formula is the longest of a few chains of passes and transfers that must follow one another, so
none is above what the event simulator finds, and any is right to discard a configuration by. Where
all chunks take the same time and transfers none, they are exact for `gpipe`, `one_f_one_b`,
`interleaved`, and `zero_bubble_h1` (weight halves no longer than the other passes). `dualpipe` is
exact where besides forward, input and weight gradient take the same time, and a pair at least that
of two. The formula of `zero_bubble_v` has no idle time but the way to a rank. What the first or the
last backward pass of a chunk takes less than the others is taken off once for every chunk, what
they take more is not looked at. Times may be columns, one entry per configuration of the same ranks
and micro batches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from foretoken.simulator.training.pipeline import ChunkTimes, LinkRules, Time, find_pair
from foretoken.simulator.training.schedule import Pass, PipelineSchedule, find_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """What a formula needs: `ChunkTimes` in the order of the model, and numbers."""

    chunk_times: Sequence[ChunkTimes]
    num_ranks: int
    num_micro_batches: int
    rules: LinkRules


def bound_pipeline_us(schedule: str, shape: PipelineShape) -> Time:
    """Return the time of the passes of a step, in µs, never above the event simulator's.

    A schedule without a formula is bounded by the work its table gives the busiest rank.

    Raises:
        UnknownPluginError: no such schedule.
        InvalidRequestError: numbers that do not suit a schedule without a formula.

    """
    formula = _FORMULAS.get(schedule)
    if formula is None:
        return bound_work_us(find_schedule(schedule), shape)
    bound: Time = formula(_Times(shape)) - _saved_us(shape.chunk_times)
    return bound


def bound_work_us(schedule: PipelineSchedule, shape: PipelineShape) -> Time:
    """Return the work a schedule's table gives the busiest rank, in µs.

    Raises:
        InvalidRequestError: numbers that do not suit the schedule.

    """
    chunks = shape.chunk_times
    virtual_stages = len(chunks) // shape.num_ranks
    orders = schedule.orders(shape.num_ranks, shape.num_micro_batches, virtual_stages)
    works = [_sum([_slot_us(slot, chunks) for slot in order]) for order in orders]
    return _max(works) - _saved_us(chunks)


def _saved_us(chunks: Sequence[ChunkTimes]) -> Time:
    """Return what first and last backward passes take less than the others at most."""
    return _sum(
        [
            np.maximum(0.0, times.backward_us - other)
            for times in chunks
            for other in (times.first_backward_us, times.last_backward_us)
            if other is not None
        ]
    )


def _slot_us(slot: tuple[Pass, ...], chunks: Sequence[ChunkTimes]) -> Time:
    together = find_pair(slot, [times.overlapped_us for times in chunks])
    if together is not None:
        return together
    return _sum([_pass_us(item, chunks[item.chunk]) for item in slot])


def _pass_us(item: Pass, times: ChunkTimes) -> Time:
    return {
        "forward": times.forward_us,
        "backward": times.backward_us,
        "backward_input": times.backward_input_us,
        "backward_weight": times.backward_weight_us,
    }[item.kind]


class _Times:
    """The times of chunks as lists, one entry per chunk; sends where a neighbour takes them."""

    def __init__(self, shape: PipelineShape) -> None:
        chunks = shape.chunk_times
        self.num_ranks = shape.num_ranks
        self.num_micro_batches = shape.num_micro_batches
        self.holds_sender = shape.rules.transfers == "rendezvous"
        self.is_duplex = shape.rules.has_duplex_links
        self.overlapped = [chunk.overlapped_us for chunk in chunks]
        self.forward = [chunk.forward_us for chunk in chunks]
        self.input = [chunk.backward_input_us for chunk in chunks]
        self.weight = [chunk.backward_weight_us for chunk in chunks]
        self.backward = [chunk.backward_us for chunk in chunks]
        none: Time = 0.0
        is_sent = shape.num_ranks > 1
        sends = [chunk.send_forward_us if is_sent else none for chunk in chunks]
        sends_back = [chunk.send_backward_us if is_sent else none for chunk in chunks]
        self.send, self.send_back = [*sends[:-1], none], [none, *sends_back[1:]]

    def cut(self, chunk: int) -> None:
        """Let nothing be sent between a chunk and the one after: both are on one rank."""
        self.send[chunk] = self.send_back[chunk + 1] = 0.0

    def way_in_us(self, chunk: int) -> Time:
        """Return the time until the first input of a chunk is there."""
        return _sum(self.forward[:chunk]) + _sum(self.send[:chunk])

    def way_out_us(self, chunk: int) -> Time:
        """Return the time from the last gradient of a chunk's input until the pipeline is empty."""
        return _sum(self.input[:chunk]) + _sum(self.send_back[: chunk + 1])

    def work_us(self, chunks: Iterable[int]) -> Time:
        """Return what a rank with these chunks does in a step, sends included that hold it."""
        total: Time = 0.0
        for chunk in chunks:
            total = total + self.forward[chunk] + self.backward[chunk]
            if self.holds_sender:
                total = total + self.send[chunk] + self.send_back[chunk]
        return self.num_micro_batches * total


def _bound_gpipe(times: _Times) -> Time:
    """Return all forward, then all backward passes: two flow shops whose jobs are all alike."""
    total: Time = 0.0
    sends_back = [*times.send_back[1:], 0.0]
    for passes, sends in ((times.forward, times.send), (times.backward, sends_back)):
        machines = [*passes, *sends]
        if times.holds_sender:
            received = [0.0, *sends[:-1]]
            machines = [sum(parts) for parts in zip(received, passes, sends, strict=True)]
        total = total + _sum(passes) + _sum(sends) + (times.num_micro_batches - 1) * _max(machines)
    return total


def _bound_one_f_one_b(times: _Times) -> Time:
    """Return the longest chain where backward passes are whole."""
    times.input, times.weight = times.backward, [0.0] * times.num_ranks
    return _bound_alternating(times, _sequential_holds)


def _bound_zero_bubble_h1(times: _Times) -> Time:
    return _bound_alternating(times, _batched_holds)


@dataclass(frozen=True, slots=True)
class _Holds:
    """How long transfers hold a rank.

    `forward` and `backward` are for a pass in a row of its kind, the others for what follows a pass
    where the kinds take turns.
    """

    forward: Time
    backward: Time
    after_forward: Time
    after_backward: Time


def _sequential_holds(times: _Times, rank: int) -> _Holds:
    """Return the holds of a rank that exchanges with one neighbour after the other."""
    send, send_back = times.send[rank], times.send_back[rank]
    received = times.send[rank - 1] if rank else 0.0
    received_back = times.send_back[rank + 1] if rank + 1 < times.num_ranks else 0.0
    together: Any = np.maximum if times.is_duplex else np.add
    return _Holds(
        forward=send + received,
        backward=send_back + received_back,
        after_forward=together(send, received_back),
        after_backward=together(send_back, received),
    )


def _batched_holds(times: _Times, rank: int) -> _Holds:
    """Return the holds of a rank that waits for its sends alone."""
    send, send_back = times.send[rank], times.send_back[rank]
    return _Holds(send, send_back, send, send_back)


def _bound_alternating(times: _Times, holds_of: Callable[[_Times, int], _Holds]) -> Time:
    """Return the longest chain of a forward and a backward pass in turn.

    A chain goes through the work of one rank; where that waits for a micro batch to come back from
    the ranks after it, the first one, the last, or others in between, it takes that way instead.
    """
    m, bounds = times.num_micro_batches, []
    back: list[Time] = [0.0]
    for rank in range(times.num_ranks - 1, 0, -1):
        passes = times.forward[rank] + times.input[rank]
        back.insert(0, back[0] + passes + times.send[rank - 1] + times.send_back[rank])
    way_out: Time = 0.0
    for rank in range(times.num_ranks):
        num_left = min(rank + 1, m)  # weight passes after the last input gradient
        if rank:
            way_out = way_out + times.send_back[rank] + times.input[rank - 1]
        way_out = _max([way_out, num_left * times.weight[rank]])
        holds = holds_of(times, rank) if times.holds_sender else _Holds(0.0, 0.0, 0.0, 0.0)
        depth = min(times.num_ranks - rank, m)
        num_weights = max(0, m - 1 - max(m - depth, rank))
        forward, inputs, weight = times.forward[rank], times.input[rank], times.weight[rank]
        forward_row = (depth - 1) * (forward + holds.forward)
        backward_row = (depth - 1) * (inputs + holds.backward) + num_weights * weight
        turn = forward + inputs + weight + holds.after_forward + holds.after_backward
        work = m * (forward + inputs) + (m - num_left) * weight
        work = work + (depth - 1) * (holds.forward + holds.backward)
        work = work + (m - depth + 1) * holds.after_forward + (m - depth) * holds.after_backward
        wait = back[rank] - holds.after_forward
        first, last = _max([0.0, wait - forward_row]), _max([0.0, wait - backward_row])
        waits = _max([first, last])
        if m > depth:
            between = _max([0.0, wait - (depth - 1) * turn])
            waits = first + last + ((m - 1) // depth - 1) * between
        bounds.append(times.way_in_us(rank) + work + waits + way_out)
    return _max(bounds)


def _bound_interleaved(times: _Times) -> Time:
    """Return the busiest rank with the way to it and from it."""
    if len(times.forward) == times.num_ranks:
        return _bound_one_f_one_b(times)
    times.input, times.weight = times.backward, [0.0] * len(times.forward)
    bounds = []
    for rank in range(times.num_ranks):
        work = times.work_us(range(rank, len(times.forward), times.num_ranks))
        if times.holds_sender:  # the last send is part of the way out
            work = work - times.send_back[rank]
        bounds.append(times.way_in_us(rank) + work + times.way_out_us(rank))
    return _max(bounds)


def _bound_zero_bubble_v(times: _Times) -> Time:
    """Return the busiest rank with the way to it, or one micro batch through all chunks.

    Weight passes fill the way back from a rank.
    """
    last = len(times.forward) - 1
    times.cut(times.num_ranks - 1)
    one = times.way_in_us(last) + times.forward[last] + times.input[last] + times.way_out_us(last)
    bounds = [
        times.way_in_us(rank) + times.work_us((rank, last - rank))
        for rank in range(times.num_ranks)
    ]
    return _max([one + times.weight[0], *bounds])


def _bound_dualpipe(times: _Times) -> Time:
    """Return the busiest rank with the way to it, or what DeepSeek's formula says.

    The formula is for equal times of forward, input and weight gradient: it is taken with the
    shortest of them all.
    """
    bounds = [_dualpipe_rank_us(times, rank) for rank in range(times.num_ranks // 2)]
    shortest: Time = -_max([-1 * time for time in (*times.forward, *times.input, *times.weight)])
    together = [time for pairs in times.overlapped for time in pairs.values()]
    pair = -_max([-1 * time for time in (3 * shortest, *together)])
    num_pairs = times.num_micro_batches - times.num_ranks - 1
    busy = num_pairs * pair + (times.num_micro_batches - num_pairs) * 3 * shortest
    bubble = (times.num_ranks // 2 - 1) * (pair - shortest)  # F&B + B - 3W, B being two halves
    return _max([*bounds, busy + bubble])


def _dualpipe_rank_us(times: _Times, near: int) -> Time:
    """Return the work of a rank and the way to it; `near` and `far` are its chunks."""
    far, m = times.num_ranks - 1 - near, times.num_micro_batches
    height = times.num_ranks // 2 - 1 - near
    num_paired = m // 2 - times.num_ranks + near + 1
    saved: Time = 0.0
    for forward, backward, num_pairs in (
        (near, far, num_paired - (height == 0)),
        (far, near, num_paired + height),
    ):
        together = times.overlapped[forward].get(("backward", backward))
        if together is not None:
            apart = times.forward[forward] + times.backward[backward]
            saved = saved + num_pairs * (apart - together)
    # Half of the micro batches go each way. Sends are not looked at: a pair's go together.
    work = (m / 2) * _sum([times.forward[chunk] + times.backward[chunk] for chunk in (near, far)])
    return times.way_in_us(near) + work - saved


_FORMULAS: dict[str, Callable[[_Times], Time]] = {
    "dualpipe": _bound_dualpipe,
    "gpipe": _bound_gpipe,
    "interleaved": _bound_interleaved,
    "one_f_one_b": _bound_one_f_one_b,
    "zero_bubble_h1": _bound_zero_bubble_h1,
    "zero_bubble_v": _bound_zero_bubble_v,
}


def _sum(times: Sequence[Time]) -> Time:
    return sum(times, 0.0)


def _max(times: Sequence[Time]) -> Time:
    return reduce(np.maximum, times)
