"""What describes a group of ranks, and how it can fail."""

from dataclasses import dataclass, field

from foretoken.profiler.config import TimerSpec
from foretoken.profiler.ranks.rendezvous import RendezvousSpec


class CollectiveTimingError(Exception):
    """A collective could not be timed; the message says why."""


class GroupLostError(CollectiveTimingError):
    """A rank died or is stuck: the group can time nothing more until it is opened again."""


class OtherRankError(CollectiveTimingError):
    """Another rank could not do its part; that rank says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Ranks to time collectives with: how many a node, on what kind of device, timed how.

    `rendezvous` says where several nodes meet; without an endpoint there is this one.
    """

    num_ranks: int
    is_cuda: bool
    seed: int
    timer: TimerSpec
    rendezvous: RendezvousSpec = field(default_factory=RendezvousSpec)

    @property
    def backend(self) -> str:
        """Name of torch's communication library."""
        return "nccl" if self.is_cuda else "gloo"

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_ranks * self.rendezvous.num_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """What a rank is given first: which one it is, of what group, and where they meet.

    `place` is a file, or for several nodes the `host:port` of a store in which their keys begin
    with `prefix`.
    """

    node: int
    local_rank: int
    place: str
    prefix: str
    interface: str
    timeout_s: float
    group: GroupSpec

    @property
    def rank(self) -> int:
        """Number of the rank among those of all nodes."""
        return self.node * self.group.num_ranks + self.local_rank


def ranks_of_group(devices_per_node: int, num_nodes: int, spec: GroupSpec) -> tuple[int, ...]:
    """Return the ranks of a group: the first ones of the first nodes.

    Raises:
        CollectiveTimingError: there are not as many.

    """
    present_nodes = spec.rendezvous.num_nodes
    if devices_per_node > spec.num_ranks or num_nodes > present_nodes:
        raise CollectiveTimingError(
            f"needs {devices_per_node} ranks on each of {num_nodes} nodes; there are"
            f" {spec.num_ranks} on each of {present_nodes}"
        )
    return tuple(
        node * spec.num_ranks + local
        for node in range(num_nodes)
        for local in range(devices_per_node)
    )
