"""Time one pass of a chunk of layers on two streams: computation and communication beside it.

A collective that is waited for runs where it stands, after all before it. One that is not is
carried beside computation, which is slower meanwhile. Collectives of one axis are carried one after
the other, those of different axes beside each other, as the groups of ranks of a framework have
streams of their own; nor does one that is waited for queue behind those that are not.

Layers that are alike have the same program, and once two of them in a row leave the streams in the
same state, the rest are not run but counted.
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from foretoken.domain.graph import Overlap
from foretoken.simulator.training.layer_program import (
    Column,
    Communicate,
    CommunicationKey,
    Compute,
    Duration,
    PassNodes,
    Program,
    StreamRules,
    alike_layers,
    cut_program,
    split_layers,
)

# The two states of the streams are the same where they differ by rounding alone.
_ROUNDING = 1e-12
_LEAST_US = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """A pass in µs, as columns.

    `compute_us` is computation with the host's gaps as if alone, `slowdown_us` what communication
    beside it adds, `exposed_us` what it waits for; these add up to `total_us`, of which `layers_us`
    is spent in layers. `hidden_us` is all that nothing waited for, and `left_us` what of it is
    still to come at the end.
    """

    total_us: Column
    layers_us: Column
    compute_us: Column
    slowdown_us: Column
    exposed_us: Mapping[CommunicationKey, Column]
    hidden_us: Column
    left_us: Column

    @property
    def communication_us(self) -> Column:
        """All that is communicated, hidden or not."""
        return self.hidden_us + sum(self.exposed_us.values(), np.zeros_like(self.total_us))


@dataclass(frozen=True, slots=True)
class PassParts:
    """The programs of a pass: before layers, of each run of alike layers, and after them."""

    head: Program
    runs: tuple[tuple[Program, int], ...]
    tail: Program


def time_pass(work: PassNodes, duration: Duration, rules: StreamRules) -> PassTime:
    """Return how long a pass takes; `duration` tells that of one repetition of an operator."""
    head, tail = split_layers(work.nodes)
    outside = rules.outside_of_layers
    parts = PassParts(
        head=cut_program(head, duration, outside),
        runs=tuple(
            (cut_program(nodes, duration, rules), count) for nodes, count in alike_layers(work)
        ),
        tail=cut_program(tail, duration, outside),
    )
    return _time_parts(parts, rules)


def time_all_parts(passes: Sequence[PassParts], rules: StreamRules) -> list[PassTime]:
    """Return the times of passes; those that begin with the same programs share that.

    Of `rules` the gap only tells the shape of columns: it is in the programs.
    """
    found: dict[int, PassTime] = {}
    families: dict[tuple[int, int], list[tuple[int, PassParts]]] = {}
    for index, parts in enumerate(passes):
        if len(parts.runs) == 1:
            family = id(parts.head), id(parts.runs[0][0])
            families.setdefault(family, []).append((index, parts))
        else:
            found[index] = _time_parts(parts, rules)
    for members in families.values():
        members.sort(key=lambda member: member[1].runs[0][1])
        found |= _time_family(members, rules)
    return [found[index] for index in range(len(passes))]


def _time_parts(parts: PassParts, rules: StreamRules) -> PassTime:
    streams = _Streams(rules)
    streams.run(parts.head, parts.runs[0][0] if parts.runs else None)
    before_layers = streams.clock
    for index, (program, count) in enumerate(parts.runs):
        following = parts.runs[index + 1][0] if index + 1 < len(parts.runs) else None
        streams.repeat(program, count, following)
    layers_us = streams.clock - before_layers
    streams.run(parts.tail, None)
    return streams.result(layers_us)


def _time_family(
    members: Sequence[tuple[int, PassParts]], rules: StreamRules
) -> dict[int, PassTime]:
    """Return the times of passes that differ in how many layers they have, and in what follows.

    They are sorted by the number of layers.
    """
    found: dict[int, PassTime] = {}
    streams, (_, first) = _Streams(rules), members[0]
    program = first.runs[0][0]
    streams.run(first.head, program)
    before_layers, done = streams.clock, 0
    for index, parts in members:
        done += streams.advance(program, parts.runs[0][1] - 1 - done)
        branch = streams.fork()
        branch.run(program, None)
        layers_us = branch.clock - before_layers
        branch.run(parts.tail, None)
        found[index] = branch.result(layers_us)
    return found


@dataclass(slots=True)
class _Streams:
    """The clocks of both streams, in µs, and what was spent on what."""

    rules: StreamRules
    clock: Column = field(init=False)
    free: dict[str, Column] = field(init=False)
    compute: Column = field(init=False)
    hidden: Column = field(init=False)
    slowdown: Column = field(init=False)
    exposed: dict[CommunicationKey, Column] = field(init=False)
    begun: dict[Hashable, Column] = field(init=False)

    def __post_init__(self) -> None:
        zero = np.zeros_like(self.rules.gap_us)
        self.clock = self.compute = self.hidden = self.slowdown = zero
        self.free, self.exposed, self.begun = {}, {}, {}

    @property
    def busy_us(self) -> Column:
        """How long communication goes on beside what comes next."""
        if not self.free:
            return np.zeros_like(self.clock)
        return np.maximum(0.0, reduce(np.maximum, self.free.values()) - self.clock)

    def result(self, layers_us: Column) -> PassTime:
        return PassTime(
            total_us=self.clock,
            layers_us=layers_us,
            compute_us=self.compute,
            slowdown_us=self.slowdown,
            exposed_us=self.exposed,
            hidden_us=self.hidden,
            left_us=self.busy_us,
        )

    def repeat(self, program: Program, count: int, following: Program | None) -> None:
        """Run a program `count` times, the last time with another one after it."""
        self.advance(program, count - 1)
        self.run(program, following)

    def advance(self, program: Program, count: int) -> int:
        """Run a program `count` times with itself after it; return `count`."""
        remaining = count
        while remaining > 0:
            before = self.snapshot()
            self.run(program, program)
            remaining -= 1
            if remaining and self._is_steady(before):
                self.skip(before, remaining)
                remaining = 0
        return count

    def fork(self) -> "_Streams":
        """Return streams in the same state, to run on by themselves."""
        other = copy(self)
        other.free, other.exposed = dict(self.free), dict(self.exposed)
        other.begun = dict(self.begun)
        return other

    def run(self, program: Program, following: Program | None) -> None:
        """Run a program once; what `following` wants early is begun here."""
        early = {
            step.slot: step
            for step in following or ()
            if isinstance(step, Communicate) and step.overlap is Overlap.PREFETCH
        }
        slots = {step.slot for step in program if isinstance(step, Communicate)}
        for slot, wanted in early.items():
            if slot not in slots:
                self._begin(wanted)
        for step in program:
            if isinstance(step, Compute):
                self._compute(step)
            elif step.overlap is Overlap.EXPOSED:
                self._expose(step.key, step.time_us)
            elif step.overlap is Overlap.DEFERRED:
                self._send(step.key, step.time_us)
            else:
                self._prefetch(step, early.get(step.slot))

    def _compute(self, step: Compute) -> None:
        ends = [(key, self._carry(key, time_us)) for key, time_us in step.beside]
        slowdown = self.rules.slowdown_ratio
        self.compute = self.compute + step.time_us
        if self.free and slowdown > 1:
            both_us = np.minimum(self.busy_us, step.time_us * slowdown)
            lost_us = both_us * (1 - 1 / slowdown)
            self.slowdown = self.slowdown + lost_us
            self.clock = self.clock + step.time_us + lost_us
        else:
            self.clock = self.clock + step.time_us
        for key, end in ends:
            self._wait(key, end)

    def _expose(self, key: CommunicationKey, time_us: Column) -> None:
        self.clock = self.clock + time_us
        self.exposed[key] = self.exposed.get(key, 0.0) + time_us

    def _send(self, key: CommunicationKey, time_us: Column) -> Column:
        _, axis = key
        end = np.maximum(self.clock, self.free.get(axis, self.clock)) + time_us
        self.free[axis] = end
        self.hidden = self.hidden + time_us
        return end

    def _carry(self, key: CommunicationKey, time_us: Column) -> Column:
        """Send and return the end; what takes no time is not there and nothing waits for it."""
        end = self._send(key, time_us)
        return end if time_us.all() else np.where(time_us > 0, end, self.clock)

    def _wait(self, key: CommunicationKey, end: Column) -> None:
        waited_us = np.maximum(0.0, end - self.clock)
        self.clock = self.clock + waited_us
        self.hidden = self.hidden - waited_us
        self.exposed[key] = self.exposed.get(key, 0.0) + waited_us

    def _begin(self, step: Communicate) -> None:
        self.begun[step.slot] = self._send(step.key, step.time_us)

    def _prefetch(self, step: Communicate, following: Communicate | None) -> None:
        begun = self.begun.pop(step.slot, None)
        self._wait(step.key, self._carry(step.key, step.time_us) if begun is None else begun)
        if following is not None:
            self._begin(following)

    def snapshot(self) -> "_Snapshot":
        """Return the state, which what is run later leaves as it is."""
        return _Snapshot(
            clock=self.clock,
            free=dict(self.free),
            totals=(self.compute, self.hidden, self.slowdown),
            exposed=dict(self.exposed),
            begun=dict(self.begun),
        )

    def _is_steady(self, before: "_Snapshot") -> bool:
        """Tell whether the streams stand to each other as they did a layer before."""
        if before.begun.keys() != self.begun.keys() or before.free.keys() != self.free.keys():
            return False
        passed = self.clock - before.clock
        if not all(_is_same(self.begun[slot] - passed, before.begun[slot]) for slot in self.begun):
            return False
        for axis, end in self.free.items():
            now, then = np.maximum(end, self.clock), np.maximum(before.free[axis], before.clock)
            if not _is_same(now - self.clock, then - before.clock):
                return False
        return True

    def skip(self, before: "_Snapshot", count: int) -> None:
        """Add the last layer `count` times more."""
        passed = (self.clock - before.clock) * count
        compute, hidden, slowdown = before.totals
        self.compute = self.compute + (self.compute - compute) * count
        self.hidden = self.hidden + (self.hidden - hidden) * count
        self.slowdown = self.slowdown + (self.slowdown - slowdown) * count
        for key, total in self.exposed.items():
            self.exposed[key] = total + (total - before.exposed.get(key, 0.0)) * count
        self.free = {
            axis: end + np.maximum(end - np.maximum(before.free[axis], before.clock), 0.0) * count
            for axis, end in self.free.items()
        }
        self.clock = self.clock + passed
        self.begun = {slot: end + passed for slot, end in self.begun.items()}


def _is_same(now: Column, then: Column) -> bool:
    return bool((np.abs(now - then) <= _ROUNDING * np.abs(then) + _LEAST_US).all())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """The state of the streams between two layers."""

    clock: Column
    free: Mapping[str, Column]
    totals: tuple[Column, Column, Column]
    exposed: Mapping[CommunicationKey, Column]
    begun: Mapping[Hashable, Column]
