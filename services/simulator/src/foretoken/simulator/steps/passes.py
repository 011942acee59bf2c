"""Time passes of chunks of layers: what a chunk runs before its layers, in them and after.

Passes whose layers run the same programs are run through the streams at once, whatever they have
before and after: the kinds of chunks of very many strategies, or the one chunk of a scenario.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from foretoken.domain.lowering.graph import Overlap
from foretoken.simulator.steps.program import (
    Column,
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
from foretoken.simulator.steps.streams import Streams, join_streams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassTime:
    """A pass in µs, as columns.

    `compute_us` is computation with the host's gaps as if alone, `slowdown_us` what communication
    beside it adds, `exposed_us` what it waits for; these add up to `total_us`, of which `layers_us`
    is spent in layers, where that is kept. `hidden_us` is all that nothing waited for, and
    `left_us` what of it is still to come at the end.
    """

    total_us: Column
    compute_us: Column
    exposed_us: Mapping[CommunicationKey, Column]
    hidden_us: Column
    left_us: Column
    layers_us: Column | float = 0.0

    @property
    def all_exposed_us(self) -> Column:
        """All communication that is waited for."""
        first, *others = self.exposed_us.values() or (np.zeros_like(self.total_us),)
        return sum(others, first)

    @property
    def communication_us(self) -> Column:
        """All that is communicated, hidden or not."""
        return self.hidden_us + self.all_exposed_us

    @property
    def slowdown_us(self) -> Column:
        """What communication beside computation adds to it."""
        return np.maximum(0.0, self.total_us - self.compute_us - self.all_exposed_us)


@dataclass(frozen=True, slots=True, eq=False)
class PassParts:
    """The programs of a pass: before layers, of each run of alike layers, and after them.

    Columns are [..., kind, case]. A run has its number of layers of each kind, at least one. The
    head has a column for each that differs; `heads` tells which one a kind's is. What a column does
    not have before or after its layers takes no time there.
    """

    head: Program
    runs: tuple[tuple[Program, tuple[int, ...]], ...]
    tail: Program
    heads: tuple[int, ...] = (0,)


def time_pass(work: PassNodes, duration: Duration, rules: StreamRules) -> PassTime:
    """Return how long a pass takes; `duration` tells that of one repetition of an operator.

    Its columns have no kinds: [case].
    """
    head, tail = split_layers(work.nodes)
    outside = rules.outside_of_layers
    parts = PassParts(
        head=cut_program(head, duration, outside),
        runs=tuple(
            (cut_program(nodes, duration, rules), (count,)) for nodes, count in alike_layers(work)
        ),
        tail=cut_program(tail, duration, outside),
    )
    (time,) = time_passes([parts], rules.slowdown_ratio)
    return PassTime(
        total_us=time.total_us[0],
        layers_us=np.asarray(time.layers_us)[0],
        compute_us=time.compute_us[0],
        exposed_us={key: exposed_us[0] for key, exposed_us in time.exposed_us.items()},
        hidden_us=time.hidden_us[0],
        left_us=time.left_us[0],
    )


def time_passes(passes: Sequence[PassParts], slowdown_ratio: float) -> list[PassTime]:
    """Return the times of passes; those whose layers run the same programs are run together."""
    families: dict[tuple[int, ...], list[int]] = {}
    for index, parts in enumerate(passes):
        families.setdefault(tuple(id(program) for program, _ in parts.runs), []).append(index)
    found: dict[int, PassTime] = {}
    for members in families.values():
        own = [passes[index] for index in members]
        found |= zip(members, _time_family(own, slowdown_ratio), strict=True)
    return [found[index] for index in range(len(passes))]


def _time_family(passes: Sequence[PassParts], slowdown_ratio: float) -> list[PassTime]:
    programs = [program for program, _ in passes[0].runs]
    streams, kinds = _run_heads(passes, slowdown_ratio)
    started_us = streams.clock[..., kinds, :]
    if not programs:
        streams = streams.pick(kinds)
    for number, program in enumerate(programs):
        counts = [count - 1 for parts in passes for count in parts.runs[number][1]]
        streams = streams.advance(program, counts, kinds)
        streams.run(program, *programs[number + 1 : number + 2])
        kinds = list(range(len(counts)))
    layers_us = streams.clock - started_us
    in_layers = [_Spent.in_program(program) for program in programs]
    found, start = [], 0
    for parts in passes:
        stop = start + len(parts.heads)
        own = streams.take(start, stop)
        own.run(parts.tail)
        spent = _Spent.in_pass(parts, in_layers)
        found.append(spent.time(own, layers_us[..., start:stop, :]))
        start = stop
    return found


def _run_heads(passes: Sequence[PassParts], slowdown_ratio: float) -> tuple[Streams, list[int]]:
    """Run what comes before layers, each program once; return with it the head of every kind."""
    begun: list[Streams] = []
    first: dict[int, int] = {}
    kinds: list[int] = []
    for parts in passes:
        if id(parts.head) not in first:
            first[id(parts.head)] = sum(streams.clock.shape[-2] for streams in begun)
            shape = _shape_of(parts.head, parts.runs[0][0] if parts.runs else parts.tail)
            shape = (*shape[:-2], max(parts.heads) + 1, shape[-1])
            streams = Streams(clock=np.zeros(shape), slowdown_ratio=slowdown_ratio)
            streams.run(parts.head, *(program for program, _ in parts.runs[:1]))
            begun.append(streams)
        kinds += [first[id(parts.head)] + head for head in parts.heads]
    return join_streams(begun), kinds


def _shape_of(*programs: Program) -> tuple[int, ...]:
    return np.broadcast_shapes(*(step.time_us.shape for program in programs for step in program))


@dataclass(frozen=True, slots=True, eq=False)
class _Spent:
    """What programs take, whenever they run: computation, communication waited for, and beside."""

    computed_us: Column
    exposed_us: Mapping[CommunicationKey, Column]
    sent_us: Column

    @classmethod
    def in_program(cls, program: Program) -> "_Spent":
        """Add up the steps of a program."""
        computed: Column = np.zeros(1)
        exposed: dict[CommunicationKey, Column] = {}
        sent: Column = np.zeros(1)
        for step in program:
            if isinstance(step, Compute):
                computed = computed + step.time_us
                for _, time_us in step.beside:
                    sent = sent + time_us
            elif step.overlap is Overlap.EXPOSED:
                exposed[step.key] = exposed.get(step.key, 0.0) + step.time_us
            else:
                sent = sent + step.time_us
        return cls(computed, exposed, sent)

    @classmethod
    def in_pass(cls, parts: PassParts, in_layers: Sequence["_Spent"]) -> "_Spent":
        """Add up the programs of a pass."""
        heads = list(parts.heads)
        runs = [
            spent.repeat(np.array(counts, dtype=np.float64)[:, None])
            for spent, (_, counts) in zip(in_layers, parts.runs, strict=True)
        ]
        return reduce(
            _Spent.add,
            runs,
            cls.in_program(parts.head).of_kinds(heads).add(cls.in_program(parts.tail)),
        )

    def time(self, streams: Streams, layers_us: Column) -> PassTime:
        """Return the time of a pass that has run."""
        waited, shape = streams.waited, streams.clock.shape

        def full(column: Column | float) -> Column:
            return np.broadcast_to(column, shape)

        return PassTime(
            total_us=streams.clock,
            layers_us=layers_us,
            compute_us=full(self.computed_us),
            exposed_us={
                key: full(self.exposed_us.get(key, 0.0) + waited.get(key, 0.0))
                for key in dict.fromkeys((*self.exposed_us, *waited))
            },
            hidden_us=full(self.sent_us - sum(waited.values(), 0.0)),
            left_us=streams.left_us,
        )

    def of_kinds(self, kinds: Sequence[int]) -> "_Spent":
        def pick(column: Column) -> Column:
            is_one = column.ndim == 1 or column.shape[-2] == 1
            return column if is_one else column[..., kinds, :]

        exposed = {key: pick(column) for key, column in self.exposed_us.items()}
        return _Spent(pick(self.computed_us), exposed, pick(self.sent_us))

    def repeat(self, count: Column) -> "_Spent":
        exposed = {key: column * count for key, column in self.exposed_us.items()}
        return _Spent(self.computed_us * count, exposed, self.sent_us * count)

    def add(self, other: "_Spent") -> "_Spent":
        exposed = dict(self.exposed_us)
        for key, column in other.exposed_us.items():
            exposed[key] = exposed.get(key, 0.0) + column
        return _Spent(self.computed_us + other.computed_us, exposed, self.sent_us + other.sent_us)
