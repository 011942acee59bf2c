"""The kinds of chunks that a model is cut into: of very many chunks few differ in what they run."""

from dataclasses import dataclass
from functools import cache

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.simulator.rank import even_layers
from foretoken.simulator.steps.program import covered_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkKind:
    """What a chunk holds, and what passes between it and its neighbours.

    `layers` are those of one chunk of the kind. It gets its input, and the gradient of its output,
    from another rank if it `receives_` them. `has_copy` is of a tied head away from the embedding,
    which is a copy. `num_first` layers are of the first type, where a model has two.
    """

    has_embedding: bool
    has_head: bool
    receives_input: bool
    receives_gradient: bool
    has_copy: bool
    num_first: int
    layers: range

    @property
    def pass_key(self) -> tuple[int, ...]:
        """What the times of its passes depend on."""
        ends = (self.has_embedding, self.has_head, self.receives_input, self.receives_gradient)
        return (*map(int, ends), self.num_first, len(self.layers))

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
    """A model in chunks: the kinds there are, and of every chunk, in the model's order, its own.

    `ranks` are the chunks of each rank of the pipeline, `sources` and `targets` the ranks between
    which the output of a chunk goes to the next one; these are equal where it stays.
    """

    kinds: tuple[ChunkKind, ...]
    kind_of_chunk: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    is_folded: bool
    is_mirrored: bool

    @property
    def rank_kinds(self) -> dict[tuple[int, ...], list[int]]:
        """The ranks whose chunks are of the same kinds, by these."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, chunks in enumerate(self.ranks):
            found.setdefault(tuple(self.kind_of_chunk[chunk] for chunk in chunks), []).append(rank)
        return found


@cache
def cut_model(num_layers: int, num_dense: int, pp: int, num_chunks: int, form: str) -> ChunkCut:
    """Return how a schedule cuts a model, of which the first `num_dense` layers are another type.

    By its `form` the chunks go round the ranks (`round`), are `folded` back over them, or are held
    by two ranks each (`mirrored`).
    """
    layers = even_layers(num_layers, num_chunks)
    # One rank has the first chunk and the last, so a tied head is no copy.
    is_folded = form != "round" or pp == 1
    home = [_home(chunk, pp, form) for chunk in range(num_chunks)]
    is_sent = [pp > 1 and home[i] != home[i + 1] for i in range(num_chunks - 1)] + [False]
    kinds: dict[tuple[int, ...], tuple[int, ChunkKind]] = {}
    of_chunk, start = [], 0
    for chunk, count in enumerate(layers):
        kind = ChunkKind(
            has_embedding=chunk == 0,
            has_head=chunk == num_chunks - 1,
            receives_input=chunk > 0 and is_sent[chunk - 1],
            receives_gradient=is_sent[chunk],
            has_copy=chunk > 0 and not is_folded,
            num_first=max(0, min(num_dense, start + count) - start),
            layers=range(start, start + count),
        )
        number, _ = kinds.setdefault(kind.pass_key, (len(kinds), kind))
        of_chunk.append(number)
        start += count
    ranks = [[chunk for chunk in range(num_chunks) if home[chunk] == rank] for rank in range(pp)]
    if form == "mirrored":
        ranks = [sorted({rank, pp - 1 - rank}) for rank in range(pp)]
    return ChunkCut(
        kinds=tuple(kind for _, kind in kinds.values()),
        kind_of_chunk=tuple(of_chunk),
        ranks=tuple(map(tuple, ranks)),
        sources=tuple(home),
        targets=(*home[1:], home[-1]),
        is_folded=is_folded,
        is_mirrored=form == "mirrored" and pp > 1,
    )


def _home(chunk: int, pp: int, form: str) -> int:
    """Return the rank that holds a chunk; of two the first."""
    if form == "folded" and chunk >= pp:
        return 2 * pp - 1 - chunk
    return chunk % pp
