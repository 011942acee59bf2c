"""Times of very many passes at once, whose steps are the same but for what each takes.

The streams are those of `pass_timing`, with columns for kinds of chunks too, and of what is spent
only what a search asks for: what programs compute and send is added up once, whatever waits.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from foretoken.domain.graph import Overlap
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.training.layer_program import Column, Communicate, Compute, Program
from foretoken.simulator.training.pass_timing import PassParts

# What is kept of a pass in µs: its time, what it waits for communication, what nothing waited for
# and what of that is left at its end, and computation.
TOTAL, EXPOSED, HIDDEN, LEFT, COMPUTE = range(5)
NUM_STACKED = 5
# Two states of the streams are the same where they differ by rounding alone.
_ROUNDING = 1e-12
_LEAST_US = 1e-9
# Layers after which a stream may be found to fall behind.
_NUM_TRANSIENT = 2
# What is done to streams, one step after the other.
_Script = Sequence[tuple[Callable[..., None], tuple[Any, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class StackedParts:
    """Passes with the same layers in other numbers: columns are (variant, kind, member).

    Of its one run of layers kinds have `counts`, all of them or none some. The head has a column
    for each that differs; `heads` tells which one a kind's is. What a column does not have before
    or after its layers takes no time there.
    """

    parts: PassParts
    counts: tuple[int, ...]
    heads: tuple[int, ...]


def time_stacked(passes: Sequence[StackedParts], slowdown_ratio: float) -> list[Floats]:
    """Return the times of passes whose run of layers is the same.

    Each is (field, variant, kind, member).
    """
    with_layers = [item for item in passes if all(item.counts)]
    found = iter(_time_with_layers(with_layers, slowdown_ratio) if with_layers else ())
    return [
        next(found) if all(item.counts) else _time_without_layers(item, slowdown_ratio)
        for item in passes
    ]


def _time_without_layers(item: StackedParts, slowdown_ratio: float) -> Floats:
    ((program, _),) = item.parts.runs
    head, tail = item.parts.head, item.parts.tail
    begun = _Streams.at_rest(_shape_of(head, program))
    begun.run(_script(head, None, slowdown_ratio))
    streams = _gather([(begun, at) for at in item.heads])
    streams.run(_script(tail, None, slowdown_ratio))
    outside = (_Spent.in_program(head), _Spent.in_program(tail))
    return _fields(streams, item, _Spent.in_program(program), outside)


def _time_with_layers(passes: Sequence[StackedParts], slowdown_ratio: float) -> list[Floats]:
    ((program, _),) = passes[0].parts.runs
    begun, heads, num_heads = [], [], 0
    for item in passes:
        streams = _Streams.at_rest(_shape_of(item.parts.head, program))
        streams.run(_script(item.parts.head, program, slowdown_ratio))
        begun.append(streams)
        heads += [num_heads + head for head in item.heads]
        num_heads += max(item.heads) + 1
    counts = [count - 1 for item in passes for count in item.counts]
    after = _join(begun).advance(program, counts, heads, slowdown_ratio)
    after.run(_script(program, None, slowdown_ratio))
    in_layer = _Spent.in_program(program)
    found, start = [], 0
    for item in passes:
        own = after.slice(start, start + len(item.counts))
        start += len(item.counts)
        own.run(_script(item.parts.tail, None, slowdown_ratio))
        outside = (_Spent.in_program(item.parts.head), _Spent.in_program(item.parts.tail))
        found.append(_fields(own, item, in_layer, outside))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Spent:
    """What a program takes, whenever it runs: computation, communication waited for, and beside."""

    computed_us: Column
    waited_us: Column
    sent_us: Column

    @classmethod
    def in_program(cls, program: Program) -> "_Spent":
        computed: Column = np.zeros(1)
        waited: Column = np.zeros(1)
        sent: Column = np.zeros(1)
        for step in program:
            if isinstance(step, Compute):
                computed = computed + step.time_us
                for _, time_us in step.beside:
                    sent = sent + time_us
            elif step.overlap is Overlap.EXPOSED:
                waited = waited + step.time_us
            else:
                sent = sent + step.time_us
        return cls(computed, waited, sent)


def _fields(
    streams: "_Streams", item: StackedParts, in_layer: _Spent, outside: tuple[_Spent, _Spent]
) -> Floats:
    """Return what passes take in all: (field, variant, kind, member)."""
    heads, counts = list(item.heads), np.array(item.counts, dtype=np.float64)[:, None]
    head, tail = outside

    def add_up(name: str) -> Column:
        of_head = getattr(head, name)
        if of_head.ndim > 1 and of_head.shape[-2] > 1:
            of_head = of_head[..., heads, :]
        total: Column = of_head + counts * getattr(in_layer, name) + getattr(tail, name)
        return total

    found = np.empty((NUM_STACKED, *streams.clock.shape))
    found[TOTAL] = streams.clock
    found[EXPOSED] = add_up("waited_us") + streams.waited
    found[HIDDEN] = add_up("sent_us") - streams.waited
    found[LEFT] = streams.left_us
    found[COMPUTE] = add_up("computed_us")
    return found


def _shape_of(*programs: Program) -> tuple[int, ...]:
    return np.broadcast_shapes(*(step.time_us.shape for program in programs for step in program))


def _script(program: Program, following: Program | None, slowdown: float) -> _Script:
    """Return what a program does to streams; what `following` wants early is begun in it."""
    early = {
        step.slot: step
        for step in following or ()
        if isinstance(step, Communicate) and step.overlap is Overlap.PREFETCH
    }
    slots = {step.slot for step in program if isinstance(step, Communicate)}
    script: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (_Streams.begin, (wanted.slot, wanted.key[1], wanted.time_us))
        for slot, wanted in early.items()
        if slot not in slots
    ]
    for step in program:
        if isinstance(step, Compute):
            script += _compute(step, slowdown)
        elif step.overlap is Overlap.EXPOSED:
            script.append((_Streams.expose, (step.time_us,)))
        elif step.overlap is Overlap.DEFERRED:
            script.append((_Streams.send, (step.key[1], step.time_us)))
        else:
            script.append((_Streams.prefetch, (step.slot, step.key[1], step.time_us)))
            wanted = early.get(step.slot)
            if wanted is not None:
                script.append((_Streams.begin, (wanted.slot, wanted.key[1], wanted.time_us)))
    return script


def _compute(step: Compute, slowdown: float) -> _Script:
    slowed_us = step.time_us * slowdown if slowdown > 1 else None
    share = 1 - 1 / slowdown
    if not step.beside:
        return [(_Streams.compute, (step.time_us, slowed_us, share))]
    beside = tuple((key[1], time_us, bool(time_us.all())) for key, time_us in step.beside)
    return [(_Streams.compute_beside, (step.time_us, slowed_us, share, beside))]


@dataclass(slots=True, eq=False)
class _Streams:
    """The clocks of both streams in µs, (variant, kind, member), and what was waited for.

    `free` is when each stream has carried all it was given, `latest` the last of these, `begun` the
    end of what was begun early. Columns are never written to again, so a state may be kept.
    """

    clock: Floats
    waited: Floats
    latest: Floats | None = None
    free: dict[str, Floats] = field(default_factory=dict)
    begun: dict[Hashable, Floats] = field(default_factory=dict)
    backlog: "_Backlog | None" = None

    @classmethod
    def at_rest(cls, shape: tuple[int, ...]) -> "_Streams":
        return cls(np.zeros(shape), np.zeros(shape))

    @property
    def left_us(self) -> Floats:
        """How long communication goes on beside what comes next."""
        if self.latest is None:
            return np.zeros_like(self.clock)
        return np.maximum(0.0, self.latest - self.clock)

    def fork(self) -> "_Streams":
        return _Streams(self.clock, self.waited, self.latest, dict(self.free), dict(self.begun))

    def run(self, script: _Script) -> None:
        for act, values in script:
            act(self, *values)

    def compute(self, time_us: Column, slowed_us: Column | None, share: float) -> None:
        if self.latest is None or slowed_us is None:
            self.clock = self.clock + time_us
            return
        lost_us = self.latest - self.clock
        if self.backlog is not None:
            self.backlog.compute(lost_us >= slowed_us)
        np.minimum(lost_us, slowed_us, out=lost_us)
        np.maximum(lost_us, 0.0, out=lost_us)
        lost_us *= share
        lost_us += time_us
        lost_us += self.clock
        self.clock = lost_us

    def compute_beside(
        self,
        time_us: Column,
        slowed_us: Column | None,
        share: float,
        beside: Sequence[tuple[str, Column, bool]],
    ) -> None:
        ends = [self._carry(*sent) for sent in beside]
        self.compute(time_us, slowed_us, share)
        for end in ends:
            self._wait(end)

    def expose(self, time_us: Column) -> None:
        self.clock = self.clock + time_us

    def send(self, axis: str, time_us: Column) -> None:
        free = self.free.get(axis)
        if self.backlog is not None:
            self.backlog.send(axis, (self.clock if free is None else free) >= self.clock)
        end: Floats = (self.clock if free is None else np.maximum(self.clock, free)) + time_us
        self.free[axis] = end
        if self.latest is None or len(self.free) == 1:
            self.latest = end
        else:
            self.latest = np.maximum(self.latest, end)

    def begin(self, slot: Hashable, axis: str, time_us: Column) -> None:
        self.send(axis, time_us)
        self.begun[slot] = self.free[axis]

    def prefetch(self, slot: Hashable, axis: str, time_us: Column) -> None:
        begun = self.begun.pop(slot, None)
        self._wait(self._carry(axis, time_us, bool(time_us.all())) if begun is None else begun)

    def _carry(self, axis: str, time_us: Column, is_always: bool) -> Floats:
        """Send and return the end; what takes no time is not there and nothing waits for it."""
        before = self.clock
        self.send(axis, time_us)
        end = self.free[axis]
        return end if is_always else np.where(time_us > 0, end, before)

    def _wait(self, end: Floats) -> None:
        waited_us = end - self.clock
        np.maximum(waited_us, 0.0, out=waited_us)
        self.clock = self.clock + waited_us
        self.waited = self.waited + waited_us

    def advance(
        self, program: Program, counts: Sequence[int], columns: Sequence[int], slowdown: float
    ) -> "_Streams":
        """Run a program with itself after it; return one of the `columns` after each of `counts`.

        Columns are of the axis before the last one.
        """
        script = _script(program, program, slowdown)
        reached: dict[int, _Streams] = {}
        most, done, is_steady = max(counts), 0, False
        while True:
            if done in counts:
                reached[done] = self.fork()
            if done == most or is_steady:
                break
            before = self.fork()
            self.backlog = _Backlog() if done >= _NUM_TRANSIENT else None
            self.run(script)
            done += 1
            is_steady = done < most and self._is_steady(before, program)
        self.backlog = None
        later = sorted({count for count in counts if count > done})
        for count in later:
            reached[count] = self._skip(before, count - done)
        return _gather([(reached[count], at) for count, at in zip(counts, columns, strict=True)])

    def slice(self, start: int, stop: int) -> "_Streams":
        """Return some columns, of the axis before the last one."""
        own = (Ellipsis, slice(start, stop), slice(None))
        return _Streams(
            self.clock[own],
            self.waited[own],
            None if self.latest is None else self.latest[own],
            {axis: end[own] for axis, end in self.free.items()},
            {slot: end[own] for slot, end in self.begun.items()},
        )

    def _is_steady(self, before: "_Streams", program: Program) -> bool:
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
        if self.backlog is None or any(_waits_for(step, axis) for step in program):
            return False
        grows = (growth >= 0) & self.backlog.is_whole & self.backlog.is_busy.get(axis, False)
        return bool((grows | (np.abs(growth) <= _LEAST_US)).all())

    def _skip(self, before: "_Streams", count: int) -> "_Streams":
        """Return the streams after `count` layers more like the last one."""
        passed = (self.clock - before.clock) * count
        free = {
            axis: end + np.maximum(end - np.maximum(before.free[axis], before.clock), 0.0) * count
            for axis, end in self.free.items()
        }
        return _Streams(
            clock=self.clock + passed,
            waited=self.waited + (self.waited - before.waited) * count,
            latest=_latest(free),
            free=free,
            begun={slot: end + passed for slot, end in self.begun.items()},
        )


def _latest(free: Mapping[str, Floats]) -> Floats | None:
    return reduce(np.maximum, free.values()) if free else None


def _join(parts: Sequence[_Streams]) -> _Streams:
    """Return streams with the columns of all, one after the other in the axis before the last."""
    if len(parts) == 1:
        return parts[0]
    return _gather([(part, at) for part in parts for at in range(part.clock.shape[-2])])


def _gather(columns: Sequence[tuple[_Streams, int]]) -> _Streams:
    """Return streams made of columns of others, of the axis before the last one.

    They have begun the same; a stream that carried nothing is free at once.
    """
    first = columns[0][0]
    shape = (*first.clock.shape[:-2], len(columns), first.clock.shape[-1])

    def gather(find: Callable[[_Streams], Floats]) -> Floats:
        found = np.empty(shape)
        for place, (streams, at) in enumerate(columns):
            found[..., place, :] = find(streams)[..., at, :]
        return found

    def gather_free(axis: str) -> Floats:
        return gather(lambda streams: streams.free.get(axis, streams.clock))

    def gather_begun(slot: Hashable) -> Floats:
        return gather(lambda streams: streams.begun[slot])

    axes = dict.fromkeys(axis for streams, _ in columns for axis in streams.free)
    free = {axis: gather_free(axis) for axis in axes}
    return _Streams(
        clock=gather(lambda streams: streams.clock),
        waited=gather(lambda streams: streams.waited),
        latest=_latest(free),
        free=free,
        begun={slot: gather_begun(slot) for slot in first.begun},
    )


def _is_same(now: Floats, then: Floats) -> bool:
    now = now - then
    np.abs(now, out=now)
    return bool((now <= _ROUNDING * np.abs(then) + _LEAST_US).all())


def _waits_for(step: Compute | Communicate, axis: str) -> bool:
    """Tell whether a step waits for what its own stream carries."""
    if isinstance(step, Compute):
        return any(key[1] == axis for key, _ in step.beside)
    return step.overlap is Overlap.PREFETCH and step.key[1] == axis


@dataclass(slots=True)
class _Backlog:
    """Of a layer, in which columns communication slowed the `whole` of its computation.

    Streams are busy where each had something to carry whenever more came.
    """

    is_whole: Flags | bool = True
    is_busy: dict[str, Flags] = field(default_factory=dict)

    def compute(self, is_whole: Flags) -> None:
        self.is_whole = self.is_whole & is_whole

    def send(self, axis: str, is_busy: Flags) -> None:
        self.is_busy[axis] = self.is_busy.get(axis, True) & is_busy
