"""What depends on where a schedule puts the chunks of a model.

What a chunk sends goes to the rank that has the next one; to itself it sends nothing. Chunks that
fold back over the ranks bring the first and the last to one rank, where a tied embedding is one.
Chunks that two ranks hold, to feed the pipeline from both ends, have gradients that are summed over
both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.pipelines.schedule import Pass, PipelineSchedule, RankOrder
from foretoken.simulator.steps.stage_hardware import StageHardware
from foretoken.simulator.steps.state_collectives import StateExchange

_TIED, _HEAD = "embedding_gradient_all_reduce", "lm_head"


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where a schedule puts chunks.

    `chunks_of_rank` are the chunks of each rank of the pipeline. `peers` are, by chunk, the pairs
    of ranks between which its output goes to the next chunk; none where both are on one rank.
    """

    chunks_of_rank: tuple[tuple[int, ...], ...]
    peers: Mapping[int, Sequence[tuple[int, int]]]

    @classmethod
    def of_orders(cls, orders: Sequence[RankOrder]) -> Self:
        """Return where the orders of a schedule put chunks."""
        first: dict[tuple[int, int], int] = {}
        for rank, order in enumerate(orders):
            for item in _forward(order):
                first.setdefault((rank, item.chunk), item.micro_batch)
        followed = set(first.values())
        places = {
            (item.micro_batch, item.chunk): rank
            for rank, order in enumerate(orders)
            for item in _forward(order)
            if item.micro_batch in followed
        }
        peers: dict[int, list[tuple[int, int]]] = {}
        for (rank, chunk), micro_batch in first.items():
            target = places.get((micro_batch, chunk + 1), rank)
            if target != rank:
                peers.setdefault(chunk, []).append((rank, target))
        num_ranks = len(orders)
        held = [sorted(chunk for at, chunk in first if at == rank) for rank in range(num_ranks)]
        return cls(tuple(map(tuple, held)), peers)

    @staticmethod
    def of_schedule(
        schedule: PipelineSchedule, num_ranks: int, num_micro_batches: int, chunks: int
    ) -> "ChunkPlaces":
        """Return where a schedule puts chunks, so many on each rank, whatever its micro batches.

        Of these no more are ordered than fill a pipeline from both ends.
        """
        return _place(schedule, num_ranks, min(num_micro_batches, 2 * num_ranks), chunks)

    def holders(self, chunk: int) -> list[int]:
        """Return the ranks that hold a chunk."""
        return [rank for rank, held in enumerate(self.chunks_of_rank) if chunk in held]

    @property
    def is_folded(self) -> bool:
        """Whether a rank has the first chunk and the last."""
        last = max(max(held) for held in self.chunks_of_rank)
        return any({0, last} <= set(held) for held in self.chunks_of_rank)

    @property
    def is_mirrored(self) -> bool:
        """Whether two ranks hold each chunk."""
        return len(self.chunks_of_rank) > 1 and len(self.holders(0)) > 1


# A search needs it once for all that can run, and once more for what it lists.
@lru_cache(maxsize=1024)
def _place(
    schedule: PipelineSchedule, num_ranks: int, num_micro_batches: int, chunks: int
) -> ChunkPlaces:
    return ChunkPlaces.of_orders(schedule.orders(num_ranks, num_micro_batches, chunks))


def _forward(order: RankOrder) -> Iterator[Pass]:
    return (item for slot in order for item in slot if item.kind == "forward")


def share_embedding(nodes: Nodes, places: ChunkPlaces, rank: RankContext) -> Nodes:
    """Return a chunk's operators with a tied head that needs no copy of the embedding."""
    if not (rank.model.has_tied_embedding and places.is_folded):
        return nodes
    return tuple(
        replace(node, shares_weights=True) if node.role == _HEAD else node for node in nodes
    )


def place_transfers(
    nodes: Nodes, places: ChunkPlaces, rank: RankContext, hardware: StageHardware
) -> Nodes:
    """Return the transfers between a chunk and the next over the links between their ranks.

    Where several ranks hold a chunk, all take what the pair takes that is farthest apart.
    """
    peers = places.peers.get(rank.stage, ())
    pairs = [hardware.pair(source, target, rank) for source, target in peers]
    if not pairs:
        return ()
    return _over(nodes, max(pairs, key=lambda group: group.dims["num_nodes"]))


def place_far_ends(
    nodes: Nodes, places: ChunkPlaces, rank: RankContext, hardware: StageHardware
) -> tuple[int, Nodes] | None:
    """Return the rank of the pipeline with other links that transfers go to, and these there.

    None where both ends have the same.
    """
    peers = places.peers.get(rank.stage, ())
    others = [target for source, target in peers if not hardware.is_alike(source, target)]
    if not others:
        return None
    far = hardware.place(rank, others[0])
    return others[0], _over(nodes, PlacedGroup.of_nodes("pp", far))


def _over(nodes: Nodes, pair: PlacedGroup) -> Nodes:
    return tuple(
        replace(node, dims={**node.dims, **pair.dims}, num_sharing=pair.num_sharing)
        for node in nodes
    )


def place_states(
    state: StateExchange, places: ChunkPlaces, rank: RankContext, scenario: TrainingScenario
) -> StateExchange:
    """Return what a chunk's states exchange, given the ranks that hold it."""
    reduction = state.reduction
    if places.is_folded:
        reduction = tuple(node for node in reduction if node.role != _TIED)
    first, *others = places.holders(rank.stage)
    if others:
        hardware = StageHardware.of_scenario(scenario)
        pair = hardware.pair(first, others[-1], rank)
        reduction = (*reduction, _sum_of_both(state, pair, scenario))
    return replace(state, reduction=reduction)


def _sum_of_both(
    state: StateExchange, pair: PlacedGroup, scenario: TrainingScenario
) -> OperatorNode:
    """Return the sum over the two ranks of what is left to sum: all gradients, or their shards."""
    dtype = scenario.trainer.resolve().gradient_dtype or scenario.dtype.kept_in_training
    num_values = state.num_updated or sum(group.num_params for group in state.groups)
    return OperatorNode(
        role="mirrored_gradient_all_reduce",
        group="gradient_reduction",
        section=Section.GRADIENT,
        operator="all_reduce",
        dims={"message_bytes": int(dtype.bytes_of(num_values)), **pair.dims},
        dtype=dtype,
        axis=pair.axis,
        num_sharing=pair.num_sharing,
    )
