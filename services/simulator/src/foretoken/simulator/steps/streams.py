"""The two streams of a device: computation, and communication during it.

A collective that is waited for runs where it stands, after all before it. One that is not is
carried during computation, which is slower meanwhile. Collectives of one axis are carried one after
the other, those of different axes at the same time, as the groups of ranks of a framework have
streams of their own; nor does one that is waited for queue behind those that are not.

Layers that are alike have the same program, and once two of them in a row leave the streams in the
same state, the rest are not run but counted. So are they once a stream that nothing waits for falls
behind by the same in every layer.

All times are columns in µs whose last axes are the kind of chunk and the case: [..., kind, case].
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from foretoken.domain.lowering.graph import Overlap
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.steps.program import (
    Column,
    Communicate,
    CommunicationKey,
    Compute,
    Program,
)

# Two states of the streams are the same where they differ by rounding alone.
_ROUNDING = 1e-12
_LEAST_US = 1e-9
# Layers after which a stream may be found to fall behind.
_NUM_TRANSIENT = 2
# What is done to streams, one step after the other.
_Script = Sequence[tuple[Callable[..., object], tuple[Any, ...]]]


@dataclass(slots=True, eq=False)
class Streams:
    """The clocks of both streams, and what was waited for.

    `free` is when each stream has carried all it was given, `latest` the last of these, `begun` the
    end of what was begun early. Columns are never written to again, so a state may be kept.
    """

    clock: Floats
    slowdown_ratio: float
    waited: dict[CommunicationKey, Floats] = field(default_factory=dict)
    latest: Floats | None = None
    free: dict[str, Floats] = field(default_factory=dict)
    begun: dict[Hashable, Floats] = field(default_factory=dict)
    _backlog: "_Backlog | None" = None

    @property
    def left_us(self) -> Floats:
        """How long communication goes on during what comes next."""
        if self.latest is None:
            return np.zeros_like(self.clock)
        return np.maximum(0.0, self.latest - self.clock)

    def run(self, program: Program, following: Program | None = None) -> None:
        """Run a program once; what `following` wants early is begun here."""
        self._act(_script(program, following, self.slowdown_ratio))

    def advance(self, program: Program, counts: Sequence[int], kinds: Sequence[int]) -> "Streams":
        """Run a program with itself after it; return one of the `kinds` after each of `counts`."""
        script = _script(program, program, self.slowdown_ratio)
        reached: dict[int, Streams] = {}
        most, done, is_steady = max(counts), 0, False
        while True:
            if done in counts:
                reached[done] = self._fork()
            if done == most or is_steady:
                break
            before = self._fork()
            self._backlog = _Backlog() if done >= _NUM_TRANSIENT else None
            self._act(script)
            done += 1
            is_steady = done < most and self._is_steady(before, program)
        self._backlog = None
        for count in sorted({count for count in counts if count > done}):
            reached[count] = self._skip(before, count - done)
        return _gather([(reached[count], at) for count, at in zip(counts, kinds, strict=True)])

    def pick(self, kinds: Sequence[int]) -> "Streams":
        """Return the streams of kinds, which may be there more than once."""
        return _gather([(self, at) for at in kinds])

    def _fork(self) -> "Streams":
        return Streams(
            clock=self.clock,
            slowdown_ratio=self.slowdown_ratio,
            waited=dict(self.waited),
            latest=self.latest,
            free=dict(self.free),
            begun=dict(self.begun),
        )

    def _act(self, script: _Script) -> None:
        for act, values in script:
            act(self, *values)

    def compute(self, time_us: Column, slowed_us: Column | None, share: float) -> None:
        """Compute, slower by a `share` of the time that communication takes meanwhile."""
        if self.latest is None or slowed_us is None:
            self.clock = self.clock + time_us
            return
        lost_us = self.latest - self.clock
        if self._backlog is not None:
            self._backlog.compute(lost_us >= slowed_us)
        np.minimum(lost_us, slowed_us, out=lost_us)
        np.maximum(lost_us, 0.0, out=lost_us)
        lost_us *= share
        lost_us += time_us
        lost_us += self.clock
        self.clock = lost_us

    def compute_during(
        self,
        computed: tuple[Column, Column | None, float],
        concurrent: Sequence[tuple[CommunicationKey, Column, bool]],
    ) -> None:
        """Compute with communication during it, which is waited for at the end."""
        ends = [(sent[0], self._carry(*sent)) for sent in concurrent]
        self.compute(*computed)
        for key, end in ends:
            self._wait(key, end)

    def expose(self, time_us: Column) -> None:
        """Wait for a collective."""
        self.clock = self.clock + time_us

    def send(self, key: CommunicationKey, time_us: Column) -> Floats:
        """Let the stream of an axis carry a collective; return when it ends."""
        _, axis = key
        free = self.free.get(axis)
        if self._backlog is not None:
            self._backlog.send(axis, (self.clock if free is None else free) >= self.clock)
        end: Floats = (self.clock if free is None else np.maximum(self.clock, free)) + time_us
        self.free[axis] = end
        if self.latest is None or len(self.free) == 1:
            self.latest = end
        else:
            self.latest = np.maximum(self.latest, end)
        return end

    def begin(self, slot: Hashable, key: CommunicationKey, time_us: Column) -> None:
        """Send what a later step waits for."""
        self.begun[slot] = self.send(key, time_us)

    def prefetch(self, slot: Hashable, key: CommunicationKey, time_us: Column) -> None:
        """Wait for what was begun early, or is begun only now."""
        begun = self.begun.pop(slot, None)
        is_always = bool(time_us.all())
        self._wait(key, self._carry(key, time_us, is_always) if begun is None else begun)

    def _carry(self, key: CommunicationKey, time_us: Column, is_always: bool) -> Floats:
        """Send and return the end; what takes no time is not there and nothing waits for it."""
        before = self.clock
        end = self.send(key, time_us)
        return end if is_always else np.where(time_us > 0, end, before)

    def _wait(self, key: CommunicationKey, end: Floats) -> None:
        waited_us = end - self.clock
        np.maximum(waited_us, 0.0, out=waited_us)
        self.clock = self.clock + waited_us
        self.waited[key] = self.waited[key] + waited_us if key in self.waited else waited_us

    def _is_steady(self, before: "Streams", program: Program) -> bool:
        """Tell whether the streams stand to each other as they did a layer before.

        Or else that a stream which nothing of the `program` waits for falls behind ever more, by
        the same in each layer.
        """
        if before.begun.keys() != self.begun.keys() or before.free.keys() != self.free.keys():
            return False
        passed = self.clock - before.clock
        for slot, end in self.begun.items():
            if not _is_same(end - passed, before.begun[slot]):
                return False
        for axis, end in self.free.items():
            now, then = np.maximum(end, self.clock), np.maximum(before.free[axis], before.clock)
            now, then = now - self.clock, then - before.clock
            if not (_is_same(now, then) or self._falls_behind(axis, now - then, program)):
                return False
        return True

    def _falls_behind(self, axis: str, growth: Floats, program: Program) -> bool:
        """Tell whether a stream only falls behind, and slows all computation as far as it can."""
        if self._backlog is None or any(_waits_for(step, axis) for step in program):
            return False
        grows = (growth >= 0) & self._backlog.is_whole & self._backlog.is_busy.get(axis, False)
        return bool((grows | (np.abs(growth) <= _LEAST_US)).all())

    def _skip(self, before: "Streams", count: int) -> "Streams":
        """Return the streams after `count` layers more like the last one."""
        passed = (self.clock - before.clock) * count
        free = {
            axis: end + np.maximum(end - np.maximum(before.free[axis], before.clock), 0.0) * count
            for axis, end in self.free.items()
        }
        return Streams(
            clock=self.clock + passed,
            slowdown_ratio=self.slowdown_ratio,
            waited={
                key: total + (total - before.waited.get(key, 0.0)) * count
                for key, total in self.waited.items()
            },
            latest=_latest(free),
            free=free,
            begun={slot: end + passed for slot, end in self.begun.items()},
        )


def join_streams(parts: Sequence[Streams]) -> Streams:
    """Return streams with the kinds of all, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return _gather([(part, at) for part in parts for at in range(part.clock.shape[-2])])


def _gather(kinds: Sequence[tuple[Streams, int]]) -> Streams:
    """Return streams made of kinds of others.

    They have begun the same; a stream that carried nothing is free at once.
    """
    first = kinds[0][0]
    shape = (*first.clock.shape[:-2], len(kinds), first.clock.shape[-1])

    def gather(columns: Sequence[Floats | float]) -> Floats:
        found = np.empty(shape)
        for place, ((_, at), column) in enumerate(zip(kinds, columns, strict=True)):
            found[..., place, :] = column if isinstance(column, float) else column[..., at, :]
        return found

    every = [streams for streams, _ in kinds]
    free = {
        axis: gather([streams.free.get(axis, streams.clock) for streams in every])
        for axis in dict.fromkeys(axis for streams in every for axis in streams.free)
    }
    return Streams(
        clock=gather([streams.clock for streams in every]),
        slowdown_ratio=first.slowdown_ratio,
        waited={
            key: gather([streams.waited.get(key, 0.0) for streams in every])
            for key in dict.fromkeys(key for streams in every for key in streams.waited)
        },
        latest=_latest(free),
        free=free,
        begun={slot: gather([streams.begun[slot] for streams in every]) for slot in first.begun},
    )


def _script(program: Program, following: Program | None, slowdown: float) -> _Script:
    """Return what a program does to streams; what `following` wants early is begun in it."""
    early = {
        step.slot: step
        for step in following or ()
        if isinstance(step, Communicate) and step.overlap is Overlap.PREFETCH
    }
    slots = {step.slot for step in program if isinstance(step, Communicate)}
    script: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
        (Streams.begin, (wanted.slot, wanted.key, wanted.time_us))
        for slot, wanted in early.items()
        if slot not in slots
    ]
    for step in program:
        if isinstance(step, Compute):
            script.append(_compute(step, slowdown))
        elif step.overlap is Overlap.EXPOSED:
            script.append((Streams.expose, (step.time_us,)))
        elif step.overlap is Overlap.DEFERRED:
            script.append((Streams.send, (step.key, step.time_us)))
        else:
            script.append((Streams.prefetch, (step.slot, step.key, step.time_us)))
            wanted = early.get(step.slot)
            if wanted is not None:
                script.append((Streams.begin, (wanted.slot, wanted.key, wanted.time_us)))
    return script


def _compute(step: Compute, slowdown: float) -> tuple[Callable[..., object], tuple[Any, ...]]:
    slowed_us = step.time_us * slowdown if slowdown > 1 else None
    computed = (step.time_us, slowed_us, 1 - 1 / slowdown)
    if not step.concurrent:
        return Streams.compute, computed
    concurrent = tuple((key, time_us, bool(time_us.all())) for key, time_us in step.concurrent)
    return Streams.compute_during, (computed, concurrent)


def _latest(free: Mapping[str, Floats]) -> Floats | None:
    return reduce(np.maximum, free.values()) if free else None


def _is_same(now: Floats, then: Floats) -> bool:
    now = now - then
    np.abs(now, out=now)
    return bool((now <= _ROUNDING * np.abs(then) + _LEAST_US).all())


def _waits_for(step: Compute | Communicate, axis: str) -> bool:
    """Tell whether a step waits for what its own stream carries."""
    if isinstance(step, Compute):
        return any(key[1] == axis for key, _ in step.concurrent)
    return step.overlap is Overlap.PREFETCH and step.key[1] == axis


@dataclass(slots=True, eq=False)
class _Backlog:
    """Of a layer, where communication slowed the `whole` of its computation.

    Streams are busy where each had something to carry whenever more came.
    """

    is_whole: Flags | bool = True
    is_busy: dict[str, Flags] = field(default_factory=dict)

    def compute(self, is_whole: Flags) -> None:
        self.is_whole = self.is_whole & is_whole

    def send(self, axis: str, is_busy: Flags) -> None:
        self.is_busy[axis] = self.is_busy.get(axis, True) & is_busy
