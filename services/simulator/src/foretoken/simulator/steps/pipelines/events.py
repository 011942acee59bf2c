"""Run a pipeline schedule event by event.

Every rank works through its slots; what passes between ranks is a transfer on the link between
them. Transfers of a rendezvous begin when both ends have arrived and hold both until they end.
Buffered ones leave the sender free and begin as soon as the link is; the receiver waits for what
it needs. A link carries one transfer at a time, in each direction or, without duplex, in all.

All times may be columns, one entry per sample: the order of events is that of the first sample,
all others follow it. It matters only where transfers meet on a link; what a rank does in which
order is the schedule's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.results.training_report import SPAN_KINDS
from foretoken.simulator.steps.pipelines.event_program import (
    WAITS_FOR_EVER,
    PipelineProgram,
    Transfer,
    build_program,
)
from foretoken.simulator.steps.pipelines.schedule import Pass, RankOrder, pair_key

_KINDS = {name: index for index, name in enumerate(SPAN_KINDS)}
_SEND_FORWARD, _SEND_BACKWARD = _KINDS["send_forward"], _KINDS["send_backward"]
_GRADIENT_KINDS = ("backward", "backward_weight")
# Events of a run between two calls of who watches it: some hundredths of a second.
_EVENTS_PER_CALL = 1000

# A time in µs, or a column of them, one per sample.
Time: TypeAlias = float | NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTimes:
    """Times of one micro batch on one chunk, in µs, as numbers or columns of samples.

    `send_forward_us` carries activations to the chunk after, `send_backward_us` gradients to the
    one before; both are 0 where there is none. `overlapped_us` is the forward pass in one slot with
    a backward pass, by kind and chunk of that pass (not there: one after the other). The first
    backward pass of a step may differ, as it finds no gradients to add to, and the last, as
    gradients are reduced during it: `first_backward_us` and `last_backward_us` are both halves
    then; what they are more or less belongs to the weight half.
    """

    forward_us: Time
    backward_input_us: Time
    backward_weight_us: Time = 0.0
    send_forward_us: Time = 0.0
    send_backward_us: Time = 0.0
    overlapped_us: Mapping[tuple[str, int], Time] = field(default_factory=dict)
    first_backward_us: Time | None = None
    last_backward_us: Time | None = None

    @property
    def backward_us(self) -> Time:
        """Both halves of the backward pass."""
        return self.backward_input_us + self.backward_weight_us

    @property
    def all_us(self) -> Iterator[Time]:
        """Every time that is given."""
        for item in fields(self):
            time = getattr(self, item.name)
            if isinstance(time, Mapping):
                yield from time.values()
            elif time is not None:
                yield time


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRules:
    """How ranks send, as the module says.

    `transfers` is `rendezvous` or `buffered`; with `has_duplex_links` both directions of a link
    carry at once.
    """

    transfers: str = "rendezvous"
    has_duplex_links: bool = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineSpans:
    """What every rank did when in the first sample: columns, by rank, then by start.

    A transfer belongs to its sender and has the chunk that made it. `stage` is the rank, `kind` the
    number of a name in `SPAN_KINDS`. Times are µs.
    """

    stage: NDArray[np.int64]
    chunk: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    kind: NDArray[np.int64]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineRun:
    """Outcome of a schedule, in µs.

    Per rank: its end, the time it computes, and the time it is held by transfers under way (waiting
    for one to begin is not in it). `last_backward_start_us` is, by chunk, when the last pass begins
    that adds to its gradients; of a chunk that two ranks hold the later one.
    """

    rank_ends_us: tuple[Time, ...]
    busy_us: tuple[Time, ...]
    transfers_us: tuple[Time, ...]
    last_backward_start_us: tuple[Time, ...]
    list_spans: Callable[[], PipelineSpans]

    @cached_property
    def spans(self) -> PipelineSpans:
        """What every rank did when, in the first sample; listed when first asked for."""
        return self.list_spans()


class Pipeline:
    """A schedule with its transfers worked out, to be run with any times."""

    def __init__(
        self,
        orders: Sequence[RankOrder],
        rules: LinkRules,
        on_events: Callable[[], None] = lambda: None,
    ) -> None:
        """Work out what every rank does, step by step; runs call `on_events` now and then.

        Raises:
            InvalidRequestError: the schedule's ranks wait for each other for ever.

        """
        self._orders = orders
        self._on_events = on_events
        self._rules = rules
        self._program = build_program(orders, holds_sender=rules.transfers == "rendezvous")

    def run(self, chunk_times: Sequence[ChunkTimes]) -> PipelineRun:
        """Run the schedule with the times of its chunks.

        Raises:
            InvalidRequestError: the schedule's ranks wait for each other for ever.

        """
        durations = _Durations(chunk_times)
        return _Run(self._orders, self._program, self._rules, durations).run(self._on_events)


def run_pipeline(
    orders: Sequence[RankOrder], chunk_times: Sequence[ChunkTimes], rules: LinkRules
) -> PipelineRun:
    """Run the orders of a schedule once; see `Pipeline`."""
    return Pipeline(orders, rules).run(chunk_times)


class _Run:
    """The clocks of all ranks, and who has arrived at which transfer."""

    def __init__(
        self,
        orders: Sequence[RankOrder],
        program: PipelineProgram,
        rules: LinkRules,
        durations: "_Durations",
    ) -> None:
        self._rules = rules
        self._orders = orders
        self._holds_sender = rules.transfers == "rendezvous"
        self._latest: Any = np.maximum if durations.num_samples else max
        self._transfers, self._gates = program.transfers, program.gates
        self._slots = [durations.of_order(order) for order in orders]
        self._sends = [durations.of_transfer(transfer) for transfer in self._transfers]
        self._zero = durations.column(0.0)
        self._next = [0] * len(orders)
        self._clocks = [self._zero] * len(orders)
        self._held = [self._zero] * len(orders)
        # When each slot began.
        self._begun: list[list[Time]] = [[] for _ in orders]
        # What a rank still waits for: transfers whose end is not known yet.
        self._missing: list[set[int]] = [set() for _ in orders]
        self._arrivals: dict[int, Time] = {}
        self._starts: list[Time] = [self._zero] * len(self._transfers)
        # The same in the first sample.
        self._begin_us = [0.0] * len(self._transfers)
        self._ends: list[Time | None] = [None] * len(self._transfers)
        self._free: dict[tuple[int, int], Time] = {}
        self._queue = [(0.0, rank) for rank in range(len(orders))]

    def run(self, on_events: Callable[[], None]) -> PipelineRun:
        """Take the events of all ranks in the order of their times."""
        num_events = 0
        while self._queue:
            self._arrive(heappop(self._queue)[1])
            num_events += 1
            if num_events % _EVENTS_PER_CALL == 0:
                on_events()
        if any(done < len(gates) for done, gates in zip(self._next, self._gates, strict=True)):
            raise InvalidRequestError.of_field("pipeline_schedule", WAITS_FOR_EVER)
        return PipelineRun(
            rank_ends_us=tuple(self._clocks),
            busy_us=tuple(sum(slots, self._zero) for slots in self._slots),
            transfers_us=tuple(self._held),
            last_backward_start_us=self._find_last_backward(),
            list_spans=self._list_spans,
        )

    def _arrive(self, rank: int) -> None:
        """Let a rank announce what it has at its next gate, and pass the gate if it can."""
        gate = self._gates[rank][self._next[rank]]
        clock = self._clocks[rank]
        for index in gate.announced:
            if not self._holds_sender:
                self._carry(index, clock)
            elif index in self._arrivals:
                self._carry(index, self._latest(self._arrivals[index], clock))
            else:
                self._arrivals[index] = clock
        missing = {index for index in gate.awaited if self._ends[index] is None}
        if missing:
            self._missing[rank] = missing
        else:
            self._pass_gate(rank)

    def _carry(self, index: int, ready: Time) -> None:
        """Let a transfer happen as soon as its link is free; wake who waits for nothing else."""
        source, target = self._transfers[index][:2]
        link = (source, target)
        if not self._rules.has_duplex_links and source > target:
            link = (target, source)
        start = self._latest(ready, self._free.get(link, self._zero))
        end = start + self._sends[index]
        self._starts[index], self._ends[index], self._free[link] = start, end, end
        self._begin_us[index] = _estimate(start)
        for rank in (source, target):
            missing = self._missing[rank]
            if index in missing:
                missing.remove(index)
                if not missing:
                    self._pass_gate(rank)

    def _pass_gate(self, rank: int) -> None:
        """Wait for the transfers of a gate, then run its slot."""
        gate = self._gates[rank][self._next[rank]]
        clock, latest = self._clocks[rank], self._latest
        for index in self._in_time(gate.awaited):
            clock = latest(clock, self._starts[index])
            reached = latest(clock, self._ends[index])
            self._held[rank] = self._held[rank] + (reached - clock)
            clock = reached
        if gate.slot >= 0:
            self._begun[rank].append(clock)
            clock = clock + self._slots[rank][gate.slot]
        self._clocks[rank] = clock
        self._next[rank] += 1
        if self._next[rank] < len(self._gates[rank]):
            heappush(self._queue, (_estimate(clock), rank))

    def _in_time(self, awaited: Sequence[int]) -> Sequence[int]:
        if len(awaited) < 2:  # noqa: PLR2004 - nothing to sort
            return awaited
        return sorted(awaited, key=self._begin_us.__getitem__)

    def _find_last_backward(self) -> tuple[Time, ...]:
        found: dict[int, Time] = {}
        for order, begun in zip(self._orders, self._begun, strict=True):
            for chunk, index in _last_gradients(order).items():
                found[chunk] = self._latest(found.get(chunk, self._zero), begun[index])
        return tuple(found[chunk] for chunk in sorted(found))

    def _list_spans(self) -> PipelineSpans:
        """Return the spans of the first sample."""
        passes = [
            (rank, item.chunk, item.micro_batch, _KINDS[item.kind], start, start + duration)
            for rank, order in enumerate(self._orders)
            for slot, start, duration in zip(
                order,
                map(_estimate, self._begun[rank]),
                map(_estimate, self._slots[rank]),
                strict=True,
            )
            for item in slot
        ]
        sends = [
            (transfer.source, transfer.chunk, transfer.micro_batch, kind, start, end)
            for transfer, start, end in zip(
                self._transfers,
                self._begin_us,
                (_estimate(end) for end in self._ends if end is not None),
                strict=True,
            )
            if end > start
            for kind in (_SEND_FORWARD if transfer.is_forward else _SEND_BACKWARD,)
        ]
        rows = np.array([*passes, *sends], dtype=np.float64).reshape(-1, 6).T
        stage, chunk, micro_batch, kind = rows[:4].astype(np.int64)
        order = np.lexsort((kind, rows[4], stage))
        return PipelineSpans(
            stage=stage[order],
            chunk=chunk[order],
            micro_batch=micro_batch[order],
            kind=kind[order],
            start_us=rows[4][order],
            end_us=rows[5][order],
        )


class _Durations:
    """How long slots and transfers take, all as numbers or all as columns."""

    def __init__(self, chunk_times: Sequence[ChunkTimes]) -> None:
        self._chunk_times = chunk_times
        values = [time for times in chunk_times for time in times.all_us]
        # 0: numbers
        self.num_samples = max((np.size(value) for value in values if np.ndim(value)), default=0)
        names = ("forward", "backward", "backward_input", "backward_weight")
        self._passes = {
            (name, chunk): self.column(getattr(times, f"{name}_us"))
            for chunk, times in enumerate(chunk_times)
            for name in names
        }
        self._sends = {
            (is_forward, chunk): self.column(us)
            for chunk, times in enumerate(chunk_times)
            for is_forward, us in (
                (True, times.send_forward_us),
                (False, times.send_backward_us),
            )
        }

    def column(self, time: Time) -> Time:
        """Return a time as all others are."""
        if not self.num_samples:
            return float(time)
        return np.broadcast_to(np.asarray(time, dtype=np.float64), self.num_samples)

    def of_transfer(self, transfer: Transfer) -> Time:
        """Return the time of a transfer on a free link."""
        return self._sends[transfer.is_forward, transfer.chunk]

    def of_order(self, order: RankOrder) -> list[Time]:
        """Return the time of every slot."""
        durations = [
            self._passes[slot[0].kind, slot[0].chunk] if len(slot) == 1 else self._of_pair(slot)
            for slot in order
        ]
        for ends, name in (
            (_first_gradients(order), "first_backward_us"),
            (_last_gradients(order), "last_backward_us"),
        ):
            for chunk, index in ends.items():
                other: Time | None = getattr(self._chunk_times[chunk], name)
                if other is not None:
                    change = self.column(other) - self._passes["backward", chunk]
                    durations[index] = durations[index] + change
        return durations

    def _of_pair(self, slot: tuple[Pass, ...]) -> Time:
        """Return the time of passes in one slot; what they overlap is known by the forward one."""
        together = find_pair(slot, [times.overlapped_us for times in self._chunk_times])
        if together is not None:
            return self.column(together)
        return sum((self._passes[item.kind, item.chunk] for item in slot), self.column(0.0))


def find_pair(
    slot: tuple[Pass, ...], overlapped_us: Sequence[Mapping[tuple[str, int], Time]]
) -> Time | None:
    """Return what a slot of a forward and a backward pass takes, if its chunk's times tell."""
    key = pair_key(slot)
    return None if key is None else overlapped_us[key[0]].get(key[1:])


def _last_gradients(order: RankOrder) -> dict[int, int]:
    """Return by chunk the last slot that adds to its gradients."""
    return {
        item.chunk: index
        for index, slot in enumerate(order)
        for item in slot
        if item.kind in _GRADIENT_KINDS
    }


def _first_gradients(order: RankOrder) -> dict[int, int]:
    """Return by chunk the first slot that adds to its gradients."""
    found: dict[int, int] = {}
    for index, slot in enumerate(order):
        for item in slot:
            if item.kind in _GRADIENT_KINDS:
                found.setdefault(item.chunk, index)
    return found


def _estimate(time: Time) -> float:
    """Return the time of the first sample."""
    return time if isinstance(time, float) else float(time[0])
