"""How many micro batches a rank holds at the moments at which it can hold most.

What a rank holds is a sum: of each of its chunks as many micro batches as have run forward and not
backward, and what the passes of the moment take. So a few moments of its order stand for all: those
that no other one exceeds in every count. A schedule in its steady state repeats them, and more
micro batches add none.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.pipelines.schedule import PipelineSchedule, RankOrder

Counts = NDArray[np.int64]

# A schedule that holds as much with so many micro batches per rank as with one more of them is in
# its steady state; by the last it is, if it has any.
_ROUNDS = (1, 2, 3)


@dataclass(frozen=True, slots=True, eq=False)
class FullMoments:
    """The moments of one rank, as counts of shape [moments, 4, chunks].

    `chunks` are those of the rank, of all in the order of the model. The four counts are of micro
    batches kept whole, of those of which only a weight gradient is left to compute, and of the
    forward and the backward passes that run.
    """

    chunks: tuple[int, ...]
    counts: Counts

    def equals(self, other: "FullMoments") -> bool:
        """Tell whether both ranks hold as much at most, whatever a chunk needs."""
        return self.chunks == other.chunks and np.array_equal(self.counts, other.counts)


def find_moments(
    schedule: PipelineSchedule, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[FullMoments, ...]:
    """Return the moments of every rank, of a schedule that takes these numbers.

    Raises:
        InvalidRequestError: the numbers do not suit the schedule.

    """
    steady = _find_steady(schedule, num_ranks, virtual_stages)
    if steady and num_micro_batches >= steady * num_ranks:
        return _find(schedule, num_ranks, steady * num_ranks, virtual_stages)
    most = _ROUNDS[-1] * num_ranks
    if steady or num_micro_batches <= most:
        return _find(schedule, num_ranks, num_micro_batches, virtual_stages)
    # All that is held may grow with every micro batch.
    these, next_ones, last = (
        _find(schedule, num_ranks, most + index * num_ranks, virtual_stages) for index in range(3)
    )
    if _are_equal(_grow(these, next_ones, 2 * num_ranks, num_ranks), last):
        return _grow(these, next_ones, num_micro_batches - most, num_ranks)
    return _find(schedule, num_ranks, num_micro_batches, virtual_stages)


def hold_most(counts: Counts, needs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the most that passes hold of a rank's chunks, whose needs are [..., 4, chunks].

    The four figures of a chunk are those of `FullMoments`, in bytes.
    """
    found: NDArray[np.float64] = np.tensordot(needs, counts, ([-2, -1], [1, 2])).max(axis=-1)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class MergedMoments:
    """The moments of ranks whose chunks need the same, as if of one, which has these `chunks`.

    `counts` are those of `FullMoments`, for the chunks `of_counts`, which stand for those alike.
    """

    chunks: tuple[int, ...]
    of_counts: tuple[int, ...]
    counts: Counts


def merge_ranks(
    moments: Sequence[FullMoments], kind_of_chunk: Sequence[Hashable]
) -> list[MergedMoments]:
    """Return the moments of ranks by the kinds of their chunks: of each kind one can be fullest."""
    alike: dict[Hashable, list[FullMoments]] = {}
    for rank in moments:
        alike.setdefault(tuple(kind_of_chunk[chunk] for chunk in rank.chunks), []).append(rank)
    return [_merge(ranks, kind_of_chunk) for ranks in alike.values()]


def _merge(ranks: Sequence[FullMoments], kind_of_chunk: Sequence[Hashable]) -> MergedMoments:
    chunks = ranks[0].chunks
    own = [kind_of_chunk[chunk] for chunk in chunks]
    distinct = list(dict.fromkeys(own))
    # Counts of chunks that are alike add up.
    places = np.array([distinct.index(kind) for kind in own])
    counts = np.concatenate([rank.counts for rank in ranks])
    merged = np.zeros((*counts.shape[:2], len(distinct)), dtype=np.int64)
    for place, column in zip(places.tolist(), np.moveaxis(counts, -1, 0), strict=True):
        merged[..., place] += column
    of_counts = tuple(chunks[own.index(kind)] for kind in distinct)
    return MergedMoments(chunks, of_counts, keep_most(merged))


def settle_micro_batches(scenario: TrainingScenario, schedule: PipelineSchedule) -> int:
    """Return fewer micro batches with which every rank holds as much at most, if there are.

    The rest of dividing them by the ranks stays, so what suits no schedule still does not.
    """
    num_ranks, count = scenario.layout.pp, scenario.num_micro_batches
    steady = _find_steady(schedule, num_ranks, scenario.virtual_stages)
    if not steady or count < (steady + 1) * num_ranks:
        return count
    return steady * num_ranks + count % num_ranks


@lru_cache(maxsize=1024)
def _find_steady(schedule: PipelineSchedule, num_ranks: int, virtual_stages: int) -> int:
    """Return the micro batches per rank from which on a schedule holds no more; 0: none known."""
    for rounds in _ROUNDS:
        try:
            these, more = (
                _find(schedule, num_ranks, count * num_ranks, virtual_stages)
                for count in (rounds, rounds + 1)
            )
        except InvalidRequestError:
            # Too few micro batches for the schedule, or ranks that never suit it.
            continue
        if _are_equal(these, more):
            return rounds
    return 0


@lru_cache(maxsize=4096)
def _find(
    schedule: PipelineSchedule, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[FullMoments, ...]:
    orders = schedule.orders(num_ranks, num_micro_batches, virtual_stages)
    return tuple(_of_order(order) for order in orders)


def _of_order(order: RankOrder) -> FullMoments:
    passes = [(slot, item) for slot, items in enumerate(order) for item in items]
    slots = np.array([slot for slot, _ in passes])
    chunks, places = np.unique([item.chunk for _, item in passes], return_inverse=True)
    kinds = np.array([_KINDS[item.kind] for _, item in passes])
    effects = np.zeros((len(order), len(_EFFECTS), len(chunks)), dtype=np.int64)
    np.add.at(effects, (slots, kinds, places), 1)
    forward, backward, halves, weights = (effects[:, kind] for kind in range(len(_EFFECTS)))
    # What a slot frees is there while it runs, and what it leaves behind is not there yet.
    whole = np.cumsum(forward - backward - halves, axis=0) + backward + halves
    half = np.cumsum(halves - weights, axis=0) - halves + weights
    counts = np.stack([whole, half, forward, backward + halves], axis=1)
    return FullMoments(tuple(chunks.tolist()), keep_most(counts))


_EFFECTS = ("forward", "backward", "backward_input", "backward_weight")
_KINDS = {kind: index for index, kind in enumerate(_EFFECTS)}


def keep_most(counts: Counts) -> Counts:
    """Return the moments that no other one exceeds in every count."""
    rows = counts.reshape(len(counts), -1)
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    kept = []
    while len(rows):
        kept.append(rows[0])
        rows = rows[(rows > rows[0]).any(axis=1)]
    # In an order of their own, so that equal moments are equal arrays.
    most = np.array(kept)
    return most[np.lexsort(most.T)].reshape(-1, *counts.shape[1:])


def _are_equal(these: Sequence[FullMoments], those: Sequence[FullMoments]) -> bool:
    return all(one.equals(other) for one, other in zip(these, those, strict=True))


def _grow(
    steady: Sequence[FullMoments], later: Sequence[FullMoments], more: int, per: int
) -> tuple[FullMoments, ...]:
    """Return `steady` with `more` micro batches, if `later` has `per` more of them."""
    return tuple(
        FullMoments(one.chunks, one.counts + (other.counts - one.counts) * more // per)
        if one.counts.shape == other.counts.shape
        else one
        for one, other in zip(steady, later, strict=True)
    )
