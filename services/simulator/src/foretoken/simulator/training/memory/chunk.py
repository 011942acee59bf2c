"""One chunk of layers as memory sees it."""

from dataclasses import dataclass

from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.options import Nodes
from foretoken.simulator.training.recompute import RecomputePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkGraph:
    """What one rank runs forward for one micro batch of a chunk, and what it keeps of that.

    `forward` is what lowering returns, without the collectives of sharded states.
    """

    rank: RankContext
    forward: Nodes
    plan: RecomputePlan
