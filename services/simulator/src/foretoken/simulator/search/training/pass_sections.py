"""The sections of a pass: before its layers, in them and after, and what chunks run of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, Overlap, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.training.chunk_kinds import ChunkKind, Ends
from foretoken.simulator.steps.program import (
    PassNodes,
    alike_layers,
    split_layers,
)
from foretoken.simulator.training.stage_operators import ChunkOperators

# Which of the kinds of chunks are run together, for each pass that is run.
Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PassSections:
    """A pass of the whole model: before its layers, in them, and after."""

    head: Nodes
    layers: Nodes
    tail: Nodes
    is_uniform: bool

    def outside(self, kind: ChunkKind, place: str, *, is_forward: bool) -> Nodes:
        """Return what a chunk runs before (`head`) or after its layers (`tail`)."""
        nodes = self.head if place == "head" else self.tail
        return tuple(node for node in nodes if runs_outside(kind, node, is_forward=is_forward))

    def places(self, kinds: Sequence[ChunkKind], *, is_forward: bool) -> Places:
        """Return which kinds can be run together.

        What is gathered early in a chunk depends on what else is, so that these run the same. Kinds
        without layers are apart from the others.
        """
        nodes = (*self.head, *self.tail)
        if not any(node.overlap is Overlap.PREFETCH for node in nodes):
            nodes = ()
        sections = dict.fromkeys(node.section for node in nodes)
        found: dict[tuple[bool, ...], list[int]] = {}
        for at, kind in enumerate(kinds):
            has = (_runs_section(kind.ends, item, is_forward=is_forward) for item in sections)
            found.setdefault((bool(kind.layers), *has), []).append(at)
        return tuple(map(tuple, found.values()))

    def runs_of(self, kind: ChunkKind, *, is_forward: bool) -> list[tuple[Nodes, int]]:
        """Return the runs of alike layers of a chunk."""
        if self.is_uniform and kind.layers:
            return [(self.layers, len(kind.layers))]
        layers = kind.layers if is_forward else kind.layers[::-1]
        return alike_layers(PassNodes(nodes=self.layers, layers=layers))


def split_pass(operators: ChunkOperators, name: str) -> PassSections:
    """Return the sections of a pass of the whole model: `forward`, `both`, `input`, `weight`."""
    work = operators.forward_pass if name == "forward" else operators.backward_pass(name)
    head, tail = split_layers(work.nodes)
    layers = tuple(node for node in work.nodes if node.section is Section.LAYER and node.repeat)
    count = operators.rank.model.num_layers
    return PassSections(head, layers, tail, all(node.repeat == count for node in layers))


def distinct_heads(kinds: Sequence[ChunkKind]) -> tuple[list[ChunkKind], tuple[int, ...]]:
    """Return kinds that differ in what they run before or after layers, and the place of each."""
    known: dict[Ends, int] = {}
    first: list[ChunkKind] = []
    places = []
    for kind in kinds:
        place = known.setdefault(kind.ends, len(first))
        if place == len(first):
            first.append(kind)
        places.append(place)
    return first, tuple(places)


def runs_outside(kind: ChunkKind, node: OperatorNode, *, is_forward: bool) -> bool:
    """Tell whether a pass of a kind runs an operator outside of layers."""
    return _runs_section(kind.ends, node.section, is_forward=is_forward)


@cache
def presence_outside(ends: tuple[Ends, ...], section: Section, *, is_forward: bool) -> Floats:
    """Return 1 for chunks whose pass runs a section outside of layers, else 0: (chunk, 1)."""
    runs = [[_runs_section(item, section, is_forward=is_forward)] for item in ends]
    found = np.array(runs, dtype=np.float64)
    found.setflags(write=False)
    return found


def _runs_section(ends: Ends, section: Section, *, is_forward: bool) -> bool:
    has_embedding, has_head, receives_input, receives_gradient = ends
    if section is Section.BOUNDARY:
        return receives_input if is_forward else receives_gradient
    if section is Section.EMBEDDING:
        return has_embedding
    return section is not Section.HEAD or has_head
