"""Time of the pipeline by formula, for searches that look at many configurations.

Each formula is the longest of a few chains of passes and transfers that must follow one another, so
none is above what the event simulator finds, and any is right to discard a configuration by. Where
all chunks take the same time and transfers none, they are exact for `gpipe`, `one_f_one_b`,
`interleaved`, and `zero_bubble_h1` (weight halves no longer than the other passes). `dualpipe` is
exact where besides forward, input and weight gradient take the same time, and a pair at least that
of two. The formula of `zero_bubble_v` has no idle time but the way to a rank. What the first or the
last backward pass of a chunk takes less than the others is taken off once for every chunk, what
they take more is not looked at. Times and numbers of micro batches may be columns, one entry per
configuration of the same ranks.

`estimate_rank_ends_us` takes the same chains for when each rank ends, with what the first and last
backward passes take less or more where a chain runs through them: near the simulator's, on either
side.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np

from foretoken.domain.units import Quantity
from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules, Time, find_pair
from foretoken.simulator.steps.pipelines.interleaved_waits import interleaved_waits_us
from foretoken.simulator.steps.pipelines.schedule import Pass, PipelineSchedule, find_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """What a formula needs: `ChunkTimes` in the order of the model, and numbers."""

    chunk_times: Sequence[ChunkTimes]
    num_ranks: int
    num_micro_batches: Quantity
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
    bound: Time = _max(formula(_Times(shape))) - _saved_us(shape.chunk_times)
    return bound


def estimate_rank_ends_us(schedule: str, shape: PipelineShape) -> list[Time]:
    """Return when each rank ends its passes, in µs, about as the event simulator finds.

    Raises:
        UnknownPluginError: no such schedule.
        InvalidRequestError: numbers that do not suit a schedule without a formula.

    """
    formula = _FORMULAS.get(schedule)
    if formula is None:
        return _works_us(find_schedule(schedule), shape)
    return formula(_Times(shape, has_ends=True))


def bound_work_us(schedule: PipelineSchedule, shape: PipelineShape) -> Time:
    """Return the work a schedule's table gives the busiest rank, in µs.

    Raises:
        InvalidRequestError: numbers that do not suit the schedule.

    """
    return _max(_works_us(schedule, shape)) - _saved_us(shape.chunk_times)


def _works_us(schedule: PipelineSchedule, shape: PipelineShape) -> list[Time]:
    """Return the work of each rank, of columns with each number of micro batches apart."""
    counts = np.asarray(shape.num_micro_batches)
    distinct = np.unique(counts)
    works = _works_alike_us(schedule, shape, int(distinct[0]))
    for count in distinct[1:]:
        own = _works_alike_us(schedule, shape, int(count))
        works = [np.where(counts == count, now, then) for now, then in zip(own, works, strict=True)]
    return works


def _works_alike_us(
    schedule: PipelineSchedule, shape: PipelineShape, num_micro_batches: int
) -> list[Time]:
    chunks = shape.chunk_times
    virtual_stages = len(chunks) // shape.num_ranks
    orders = schedule.orders(shape.num_ranks, num_micro_batches, virtual_stages)
    works = []
    for order in orders:
        # What a slot takes does not depend on which micro batch it is of.
        slots = Counter(tuple(Pass(item.kind, 0, item.chunk) for item in slot) for slot in order)
        works.append(_sum([count * _slot_us(slot, chunks) for slot, count in slots.items()]))
    return works


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
    """The times of chunks as lists, one entry per chunk; sends where a neighbour takes them.

    The first backward pass of a chunk takes `shorter` less and the last one `longer` more, which
    together `change` its work; all are 0 without `has_ends`. `begin` is when the first input is
    there.
    """

    def __init__(self, shape: PipelineShape, *, has_ends: bool = False) -> None:
        chunks = shape.chunk_times
        self.has_ends = has_ends
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
        # Chunks that are alike are one object, which is looked at once.
        alike = {id(chunk): chunk for chunk in chunks} if has_ends else {}
        change = {number: _change_us(chunk) for number, chunk in alike.items()}
        longer = {number: _longer_us(chunk) for number, chunk in alike.items()}
        shorter = {number: longer[number] - change[number] for number in alike}
        self.change, self.longer, self.shorter = (
            [known.get(id(chunk), none) for chunk in chunks] for known in (change, longer, shorter)
        )
        # The first pass is the last one too: what it takes less, a way back takes less.
        self.is_single = 1 * (np.asarray(shape.num_micro_batches) == 1)
        is_sent = shape.num_ranks > 1
        sends = [chunk.send_forward_us if is_sent else none for chunk in chunks]
        sends_back = [chunk.send_backward_us if is_sent else none for chunk in chunks]
        self.send, self.send_back = [*sends[:-1], none], [none, *sends_back[1:]]
        self.begin = self._begin()

    def cut(self, chunk: int) -> None:
        """Let nothing be sent between a chunk and the one after: both are on one rank."""
        self.send[chunk] = self.send_back[chunk + 1] = 0.0
        self.begin = self._begin()

    def join_halves(self) -> None:
        """Let backward passes be whole."""
        self.input, self.weight = self.backward, [0.0] * len(self.forward)

    def _begin(self) -> list[Time]:
        steps = [ahead + send for ahead, send in zip(self.forward, self.send, strict=True)]
        return list(accumulate(steps[:-1], initial=0.0))

    def way_out_us(self, chunk: int) -> Time:
        """Return the time from the last gradient of a chunk's input until the pipeline is empty."""
        return _sum(self.input[:chunk]) + _sum(self.send_back[: chunk + 1])

    def work_us(self, chunks: Iterable[int]) -> Time:
        """Return what a rank with these chunks does in a step, sends included that hold it."""
        total: Time = 0.0
        change: Time = 0.0
        for chunk in chunks:
            total = total + self.forward[chunk] + self.backward[chunk]
            change = change + self.change[chunk]
            if self.holds_sender:
                total = total + self.send[chunk] + self.send_back[chunk]
        work: Time = self.num_micro_batches * total + change
        return work

    def follow_back(self, chains: Sequence[Time]) -> list[Time]:
        """Return when the chunks of the first place on each rank end their last input gradient.

        `chains` are the ends of what each rank has to do without waiting for the last gradient.
        """
        ends = [chains[-1]]
        for rank in range(len(chains) - 2, -1, -1):
            back = ends[0] + self.send_back[rank + 1] + self.input[rank] + self.longer[rank]
            back = back - self.is_single * self.shorter[rank]
            ends.insert(0, np.maximum(chains[rank], back))
        return ends


def _change_us(times: ChunkTimes) -> Time:
    ends = (times.first_backward_us, times.last_backward_us)
    return _sum([other - times.backward_us for other in ends if other is not None])


def _longer_us(times: ChunkTimes) -> Time:
    last = times.last_backward_us
    return 0.0 if last is None else last - times.backward_us


def _end_gpipe(times: _Times) -> list[Time]:
    """Return all forward, then all backward passes: two flow shops whose jobs are all alike."""
    ahead = _sum(times.forward) + _sum(times.send)
    ahead = ahead + (times.num_micro_batches - 1) * _max(
        _machines(times.forward, times.send, times)
    )
    sends_back = [*times.send_back[1:], 0.0]
    machines = _machines(times.backward, sends_back, times)
    ends: list[Time] = []
    way: Time = 0.0
    longer: Time = 0.0
    shorter: Time = 0.0
    slowest: Time = -np.inf
    for rank in range(times.num_ranks - 1, -1, -1):
        way = way + times.backward[rank] + sends_back[rank] + times.longer[rank]
        # The first micro batch comes to the slowest rank, and the last one goes on from there.
        shorter = shorter + times.shorter[rank]
        most = (times.num_micro_batches - 1) * _max(machines[rank :: times.num_ranks])
        slowest = np.maximum(slowest, most - shorter - longer)
        longer = longer + times.longer[rank]
        ends.insert(0, ahead + way + np.where(times.is_single, -shorter, slowest))
    return ends


def _machines(passes: Sequence[Time], sends: Sequence[Time], times: _Times) -> list[Time]:
    """Return how long a micro batch occupies each rank, then how long each link, if on its own."""
    if not times.holds_sender:
        return [*passes, *sends]
    received = [0.0, *sends[:-1]]
    return [sum(parts) for parts in zip(received, passes, sends, strict=True)]


def _end_one_f_one_b(times: _Times) -> list[Time]:
    """Return the longest chain where backward passes are whole."""
    times.join_halves()
    return _end_alternating(times, _sequential_holds)


def _end_zero_bubble_h1(times: _Times) -> list[Time]:
    return _end_alternating(times, _batched_holds)


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


def _end_alternating(times: _Times, holds_of: Callable[[_Times, int], _Holds]) -> list[Time]:
    """Return the longest chains of a forward and a backward pass in turn.

    A chain goes through the work of one rank; where that waits for a micro batch to come back from
    the ranks after it, the first one, the last, or others in between, it takes that way instead.
    """
    m = times.num_micro_batches
    back: list[Time] = [0.0]
    for rank in range(times.num_ranks - 1, 0, -1):
        passes = times.forward[rank] + times.input[rank]
        back.insert(0, back[0] + passes + times.send[rank - 1] + times.send_back[rank])
    chains: list[Time] = []
    left: list[Time] = []
    shorter = list(accumulate(times.shorter[::-1]))[::-1]
    for rank in range(times.num_ranks):
        num_left = np.minimum(rank + 1, m)  # weight passes after the last input gradient
        left.append(num_left * times.weight[rank])
        holds = holds_of(times, rank) if times.holds_sender else _Holds(0.0, 0.0, 0.0, 0.0)
        depth = np.minimum(times.num_ranks - rank, m)
        num_weights = np.maximum(0, m - 1 - np.maximum(m - depth, rank))
        forward, inputs, weight = times.forward[rank], times.input[rank], times.weight[rank]
        forward_row = (depth - 1) * (forward + holds.forward)
        backward_row = (depth - 1) * (inputs + holds.backward) + num_weights * weight
        turn = forward + inputs + weight + holds.after_forward + holds.after_backward
        work = m * (forward + inputs) + (m - num_left) * weight
        work = work + (depth - 1) * (holds.forward + holds.backward)
        work = work + (m - depth + 1) * holds.after_forward + (m - depth) * holds.after_backward
        wait = back[rank] - holds.after_forward
        early = shorter[rank] - times.shorter[rank]  # of the first micro batch on its way back
        first = _max([0.0, wait - early - forward_row])
        last = _max([0.0, wait - times.is_single * early - backward_row])
        between = _max([0.0, wait - (depth - 1) * turn])
        waits = np.where(
            m > depth,
            first + last + ((m - 1) // depth - 1) * between,
            _max([first, last]),
        )
        chains.append(times.begin[rank] + work + waits + times.change[rank])
    ends = times.follow_back(chains)
    return [end + late for end, late in zip(ends, left, strict=True)]


def _end_interleaved(times: _Times) -> list[Time]:
    """Return the busiest rank with the way to it and from it."""
    if len(times.forward) == times.num_ranks:
        return _end_one_f_one_b(times)
    times.join_halves()
    chains = []
    for rank in range(times.num_ranks):
        work = times.work_us(range(rank, len(times.forward), times.num_ranks))
        if times.holds_sender:  # the last send is part of the way out
            work = work - times.send_back[rank]
        chains.append(times.begin[rank] + work)
    ends = times.follow_back(chains)
    if not times.has_ends:
        return ends
    waits_us = _interleaved_waits_us(times)
    return [end + waits_us for end in ends]


def _interleaved_waits_us(times: _Times) -> Time:
    """Return what ranks wait for each other's transfers, by the mean times of chunks."""
    num_chunks = len(times.forward)
    means = [_sum(parts) / num_chunks for parts in (times.forward, times.backward, times.send)]
    return interleaved_waits_us(
        (times.num_ranks, num_chunks // times.num_ranks),
        times.num_micro_batches / times.num_ranks,
        (means[0], means[1], means[2]),
        LinkRules(
            transfers="rendezvous" if times.holds_sender else "buffered",
            has_duplex_links=times.is_duplex,
        ),
    )


def _end_zero_bubble_v(times: _Times) -> list[Time]:
    """Return the busiest rank with the way to it, or one micro batch through all chunks.

    Weight passes fill the way back from a rank.
    """
    last = len(times.forward) - 1
    times.cut(times.num_ranks - 1)
    one = times.begin[last] + times.forward[last] + times.input[last] + times.way_out_us(last)
    ends = [
        times.begin[rank] + times.work_us((rank, last - rank)) for rank in range(times.num_ranks)
    ]
    return [_max([one + times.weight[0], ends[0]]), *ends[1:]]


def _end_dualpipe(times: _Times) -> list[Time]:
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
    ends = [_max([bound, busy + bubble]) for bound in bounds]
    return [*ends, *ends[::-1]]


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
    change = times.change[near] + times.change[far]
    end: Time = times.begin[near] + work - saved + change
    return end


_FORMULAS: dict[str, Callable[[_Times], list[Time]]] = {
    "dualpipe": _end_dualpipe,
    "gpipe": _end_gpipe,
    "interleaved": _end_interleaved,
    "one_f_one_b": _end_one_f_one_b,
    "zero_bubble_h1": _end_zero_bubble_h1,
    "zero_bubble_v": _end_zero_bubble_v,
}


def _sum(times: Sequence[Time]) -> Time:
    return sum(times, 0.0)


def _max(times: Sequence[Time]) -> Time:
    return reduce(np.maximum, times)
