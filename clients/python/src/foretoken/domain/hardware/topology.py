"""How devices are linked inside a node and across nodes."""

from dataclasses import dataclass
from functools import cache

from foretoken.domain.errors import UnknownTopologyError
from foretoken.domain.hardware.sourced import load_sourced


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One hop: bandwidth per device and direction, and the latency of a small message.

    `reached_ratio` is the share of that bandwidth that large messages reach, where a document says
    so (0: none does), `exchange_ratio` that which an exchange between all ranks reaches, where one
    says it (0: as `reached_ratio`). `hop_latency_us` is what each rank of a ring adds that passes a
    message on.
    """

    bandwidth_bytes_per_s: float
    latency_us: float
    reached_ratio: float = 0.0
    hop_latency_us: float = 0.0
    exchange_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologySpec:
    """Nodes of equal devices: `intra_node` links inside, `inter_node` between.

    A node has `ports_per_node` network ports of the bandwidth of `inter_node` (0: one for every
    device); devices take turns where there are fewer. Where a node `links_pairs`,
    no switch is between its devices: each has a link to every other, and `intra_node` is all of a
    device's links, of which a group has those between its own devices. `nodes_like` names a
    topology of the same nodes on another network: what was measured inside one of its nodes holds
    here too.
    """

    name: str
    description: str
    device: str
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    ports_per_node: int = 0
    nodes_like: str = ""
    links_pairs: bool = False

    @property
    def num_ports(self) -> int:
        """Network ports of a node."""
        return self.ports_per_node or self.devices_per_node

    @property
    def port_bytes_per_s(self) -> float:
        """What a device has of its node's network when all devices send at once."""
        share = min(1.0, self.num_ports / self.devices_per_node)
        link = self.inter_node
        return link.bandwidth_bytes_per_s * share * (link.reached_ratio or 1.0)

    def link_between(self, num_nodes: int) -> Link:
        """Return the slowest link that a group over `num_nodes` nodes crosses."""
        return self.intra_node if num_nodes <= 1 else self.inter_node


@cache
def all_topologies() -> dict[str, TopologySpec]:
    """Return every topology by name: one file each in `topologies/`."""
    return load_sourced(TopologySpec, "topologies")


def find_topology(name: str) -> TopologySpec:
    """Return the topology of that name.

    Raises:
        UnknownTopologyError: there is none; the message names the nearest.

    """
    return UnknownTopologyError.look_up(name, all_topologies())


def topology_of_device(device: str, name: str = "") -> TopologySpec:
    """Return the topology of that name; where it is empty, the first one made of that device.

    Raises:
        UnknownTopologyError: there is none of that name, or no topology file uses the device.

    """
    if name:
        return find_topology(name)
    for topology in all_topologies().values():
        if topology.device == device:
            return topology
    raise UnknownTopologyError.named(device, all_topologies())
