"""The ranks of a pipeline that can be its fullest: one of each kind.

Chunks that have as many layers of the same kinds need the same, and so do ranks of such chunks. Of
these the moments of all ranks count as if they were of one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foretoken.simulator.grid import Ints
from foretoken.simulator.rank import even_layers
from foretoken.simulator.training.memory.in_flight import FullMoments, keep_most


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankKind:
    """Ranks whose chunks need the same; `chunks` are those of one of them.

    `counts` are those of `FullMoments`, of all these ranks, for the chunks `of_counts`, which stand
    for those of the rank that are alike.
    """

    chunks: tuple[int, ...]
    of_counts: tuple[int, ...]
    counts: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineCut:
    """How a pipeline cuts a model: `layers` of every chunk, and its kinds of ranks.

    With `is_shared` a rank has the first chunk and the last.
    """

    layers: tuple[int, ...]
    ranks: tuple[RankKind, ...]
    is_shared: bool

    @property
    def chunks(self) -> Ints:
        """The chunks of every rank, of shape [ranks, chunks per rank]."""
        return np.array([rank.chunks for rank in self.ranks])


@lru_cache(maxsize=1024)
def cut_pipeline(moments: tuple[FullMoments, ...], layer_kinds: tuple[int, ...]) -> PipelineCut:
    """Return the kinds of ranks of a pipeline that cuts layers of these kinds evenly."""
    last = max(chunk for rank in moments for chunk in rank.chunks)
    layers = even_layers(len(layer_kinds), last + 1)
    kinds = _chunk_kinds(layers, layer_kinds)
    alike: dict[Hashable, list[FullMoments]] = {}
    for rank in moments:
        alike.setdefault(tuple(kinds[chunk] for chunk in rank.chunks), []).append(rank)
    return PipelineCut(
        layers=layers,
        ranks=tuple(_merge(ranks, kinds) for ranks in alike.values()),
        is_shared=any({0, last} <= set(rank.chunks) for rank in moments),
    )


def _chunk_kinds(layers: Sequence[int], layer_kinds: Sequence[int]) -> list[Hashable]:
    """Return what is equal for chunks that need the same."""
    ends = np.cumsum(layers).tolist()
    return [
        (chunk == 0, chunk == len(layers) - 1, tuple(layer_kinds[end - count : end]))
        for chunk, (count, end) in enumerate(zip(layers, ends, strict=True))
    ]


def _merge(ranks: Sequence[FullMoments], kinds: Sequence[Hashable]) -> RankKind:
    chunks = ranks[0].chunks
    own = [kinds[chunk] for chunk in chunks]
    distinct = list(dict.fromkeys(own))
    # Counts of chunks that are alike add up.
    places = np.array([distinct.index(kind) for kind in own])
    counts = np.concatenate([rank.counts for rank in ranks])
    merged = np.zeros((*counts.shape[:2], len(distinct)), dtype=np.int64)
    for place, column in zip(places.tolist(), np.moveaxis(counts, -1, 0), strict=True):
        merged[..., place] += column
    return RankKind(
        chunks=chunks,
        of_counts=tuple(chunks[own.index(kind)] for kind in distinct),
        counts=keep_most(merged),
    )
