"""The kinds of chunks that a model is cut into: of very many chunks few differ in what they run."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.stack import stack_of
from foretoken.simulator.steps.chunk_placement import ChunkPlaces
from foretoken.simulator.steps.program import covered_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkKind:
    """What a chunk holds, and what passes between it and its neighbours.

    `layers` are those of one chunk of the kind. It gets its input, and the gradient of its output,
    from another rank if it `receives_` them. `has_copy` is of a tied head away from the embedding,
    which is a copy. `layers` are equal by number in `alike` where they are alike.
    """

    has_embedding: bool
    has_head: bool
    receives_input: bool
    receives_gradient: bool
    has_copy: bool
    alike: tuple[int, ...]
    layers: range

    @property
    def pass_key(self) -> tuple[int, ...]:
        """What the times of its passes depend on."""
        ends = (self.has_embedding, self.has_head, self.receives_input, self.receives_gradient)
        return (*map(int, ends), *self.alike)

    def has_outside(self, node: OperatorNode, *, is_forward: bool) -> bool:
        """Tell whether a pass of the kind runs an operator outside of layers."""
        if node.section is Section.BOUNDARY:
            return self.receives_input if is_forward else self.receives_gradient
        if node.section is Section.EMBEDDING:
            return self.has_embedding
        return node.section is not Section.HEAD or self.has_head

    def count(self, node: OperatorNode) -> int:
        """Return how often a chunk of the kind runs an operator of the whole model."""
        if node.section is Section.EMBEDDING:
            return node.repeat * self.has_embedding
        if node.section is Section.HEAD:
            return node.repeat * self.has_head
        if node.section is not Section.LAYER:
            return node.repeat
        return sum(1 for layer in covered_layers(node) if layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCut:
    """A model in chunks: the kinds there are, and of every chunk, in the model's order, its own."""

    kinds: tuple[ChunkKind, ...]
    kind_of_chunk: tuple[int, ...]
    places: ChunkPlaces

    @property
    def rank_kinds(self) -> list[tuple[int, ...]]:
        """The kinds of the chunks of every rank."""
        ranks = self.places.chunks_of_rank
        return [tuple(self.kind_of_chunk[chunk] for chunk in chunks) for chunks in ranks]


@lru_cache(maxsize=64)
def number_layers(model: ModelArchitecture) -> tuple[int, ...]:
    """Return the number of each layer, counted from 0, equal for those of the same two halves."""
    numbers: dict[Hashable, int] = {}
    return tuple(
        numbers.setdefault((layer.mixer, layer.feed_forward), len(numbers))
        for layer in stack_of(model).layers
    )


def cut_model(model: ModelArchitecture, layers: Sequence[int], places: ChunkPlaces) -> ChunkCut:
    """Return a model in chunks of so many layers, where a schedule puts them."""
    alike = number_layers(model)
    kinds: dict[Hashable, tuple[int, ChunkKind]] = {}
    of_chunk, start, last = [], 0, len(layers) - 1
    for chunk, count in enumerate(layers):
        kind = ChunkKind(
            has_embedding=chunk == 0,
            has_head=chunk == last,
            receives_input=chunk - 1 in places.peers,
            receives_gradient=chunk in places.peers,
            # A rank with the first chunk and the last has one table.
            has_copy=chunk > 0 and not places.is_folded,
            alike=alike[start : start + count],
            layers=range(start, start + count),
        )
        number, _ = kinds.setdefault(kind.pass_key, (len(kinds), kind))
        of_chunk.append(number)
        start += count
    return ChunkCut(
        kinds=tuple(kind for _, kind in kinds.values()),
        kind_of_chunk=tuple(of_chunk),
        places=places,
    )
