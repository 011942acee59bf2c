"""Time passes of chunks of layers: what a chunk runs before its layers, in them and after.

Passes whose layers run the same programs are run through the streams at once, whatever they have
before and after: the kinds of chunks of very many strategies, or the one chunk of a scenario.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, Overlap, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.simulator.steps.program import (
    Column,
    CommunicationKey,
    Compute,
    Duration,
    PassNodes,
    Program,
    StreamRules,
    alike_layers,
    covered_layers,
    cut_program,
    split_layers,
)
from foretoken.simulator.steps.streams import Streams, join_streams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassTime:
    """A pass in µs, as columns.

    `compute_us` is computation with the host's gaps as if alone, `slowdown_us` what communication
    during it adds, `exposed_us` what it waits for; these add up to `total_us`, of which `layers_us`
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
        """What communication during computation adds to it."""
        return np.maximum(0.0, self.total_us - self.compute_us - self.all_exposed_us)


@dataclass(frozen=True, slots=True, eq=False)
class PassParts:
    """The programs of a pass: before layers, of each run of alike layers, and after them.

    Columns are [..., 1, case]; a run has its number of layers, at least one.
    """

    head: Program
    runs: tuple[tuple[Program, int], ...]
    tail: Program


class PassCutter:
    """Cuts the passes of chunks to programs, which are the same where operators are."""

    def __init__(self, nodes: Nodes, duration: Duration, rules: StreamRules) -> None:
        """Take the operators of a pass; `duration` tells the time of one repetition of each."""
        self._head, self._tail = split_layers(nodes)
        self._layers = tuple(
            node for node in nodes if node.section is Section.LAYER and node.repeat
        )
        covers = set(map(covered_layers, self._layers))
        self._alike = covers.pop() if len(covers) == 1 else range(0)
        self._duration, self._rules = duration, rules
        self._outside = rules.outside_of_layers
        self._known: dict[tuple[int, ...], Program] = {}

    def cut(
        self, layers: Sequence[int], has: Callable[[OperatorNode], bool] = lambda _: True
    ) -> PassParts:
        """Return the programs of a chunk of these layers, which has some of what is outside."""
        head, tail = (
            self._program(tuple(filter(has, nodes)), self._outside)
            for nodes in (self._head, self._tail)
        )
        runs = [(self._layers, len(layers))] if len(layers) else []
        if not all(layer in self._alike for layer in layers):
            runs = alike_layers(PassNodes(nodes=self._layers, layers=layers))
        programs = tuple((self._program(nodes, self._rules), count) for nodes, count in runs)
        return PassParts(head=head, runs=programs, tail=tail)

    def _program(self, nodes: Nodes, rules: StreamRules) -> Program:
        key = tuple(map(id, nodes))
        if key not in self._known:
            self._known[key] = cut_program(nodes, self._duration, rules)
        return self._known[key]


def time_pass(work: PassNodes, duration: Duration, rules: StreamRules) -> PassTime:
    """Return how long a pass takes; `duration` tells that of one repetition of an operator.

    Its columns have no kinds: [case].
    """
    parts = PassCutter(work.nodes, duration, rules).cut(work.layers)
    ((_, time),) = time_passes([parts], rules.slowdown_ratio)
    return PassTime(
        total_us=time.total_us[0],
        layers_us=np.asarray(time.layers_us)[0],
        compute_us=time.compute_us[0],
        exposed_us={key: exposed_us[0] for key, exposed_us in time.exposed_us.items()},
        hidden_us=time.hidden_us[0],
        left_us=time.left_us[0],
    )


def time_passes(
    passes: Sequence[PassParts], slowdown_ratio: float
) -> Iterator[tuple[list[int], PassTime]]:
    """Yield the times of passes with the places of these: [..., pass, case].

    Those whose layers run the same programs are run together.
    """
    for alike in _group(passes, lambda parts: tuple(id(program) for program, _ in parts.runs)):
        own = [passes[at] for at in alike]
        heads = _group(own, lambda parts: id(parts.head))
        streams = _run_heads([own[same[0]] for same in heads], slowdown_ratio)
        kinds = [next(at for at, same in enumerate(heads) if n in same) for n in range(len(own))]
        started_us = streams.clock[..., kinds, :]
        programs = [program for program, _ in own[0].runs]
        if not programs:
            streams = streams.pick(kinds)
        for number, program in enumerate(programs):
            counts = [parts.runs[number][1] - 1 for parts in own]
            streams = streams.advance(program, counts, kinds)
            streams.run(program, *programs[number + 1 : number + 2])
            kinds = list(range(len(own)))
        layers_us = streams.clock - started_us
        in_layers = [_Spent.in_program(program) for program in programs]
        for same in _group(own, lambda parts: (id(parts.head), id(parts.tail))):
            ended, some = streams.pick(same), [own[at] for at in same]
            ended.run(some[0].tail)
            spent = _Spent.in_passes(some, in_layers)
            yield [alike[at] for at in same], spent.time(ended, layers_us[..., same, :])


def _group(passes: Sequence[PassParts], key: Callable[[PassParts], Hashable]) -> list[list[int]]:
    """Return the places of passes that are equal by a key."""
    found: dict[Hashable, list[int]] = {}
    for at, parts in enumerate(passes):
        found.setdefault(key(parts), []).append(at)
    return list(found.values())


def _run_heads(passes: Sequence[PassParts], slowdown_ratio: float) -> Streams:
    """Run what comes before layers; return one kind for each."""
    begun = []
    for parts in passes:
        first = [program for program, _ in parts.runs[:1]]
        shape = _shape_of(parts.head, *(first or [parts.tail]))
        streams = Streams(clock=np.zeros(shape), slowdown_ratio=slowdown_ratio)
        streams.run(parts.head, *first)
        begun.append(streams)
    return join_streams(begun)


def _shape_of(*programs: Program) -> tuple[int, ...]:
    """Return the shape of columns with a single kind."""
    shape = np.broadcast_shapes(*(step.time_us.shape for program in programs for step in program))
    return (*shape[:-2], 1, shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Spent:
    """What programs take, whenever they run: computation, communication waited for, overlapped."""

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
                for _, time_us in step.concurrent:
                    sent = sent + time_us
            elif step.overlap is Overlap.EXPOSED:
                exposed[step.key] = exposed.get(step.key, 0.0) + step.time_us
            else:
                sent = sent + step.time_us
        return cls(computed, exposed, sent)

    @classmethod
    def in_passes(cls, passes: Sequence[PassParts], in_layers: Sequence["_Spent"]) -> "_Spent":
        """Add up the programs of passes that differ in how many layers they have."""
        runs = [
            spent.repeat(np.array([[float(parts.runs[number][1])] for parts in passes]))
            for number, spent in enumerate(in_layers)
        ]
        outside = cls.in_program(passes[0].head).add(cls.in_program(passes[0].tail))
        return reduce(_Spent.add, runs, outside)

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

    def repeat(self, count: Column) -> "_Spent":
        exposed = {key: column * count for key, column in self.exposed_us.items()}
        return _Spent(self.computed_us * count, exposed, self.sent_us * count)

    def add(self, other: "_Spent") -> "_Spent":
        exposed = dict(self.exposed_us)
        for key, column in other.exposed_us.items():
            exposed[key] = exposed.get(key, 0.0) + column
        return _Spent(self.computed_us + other.computed_us, exposed, self.sent_us + other.sent_us)
