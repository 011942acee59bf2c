"""How devices are linked inside a node and across nodes."""

from dataclasses import dataclass
from functools import cache

from foretoken.domain import schema
from foretoken.domain.errors import UnknownTopologyError
from foretoken.domain.hardware.sourced import strip_sources
from foretoken.domain.plugins import scan_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One hop: bandwidth per device and direction, and the latency of a small message."""

    bandwidth_bytes_per_s: float
    latency_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologySpec:
    """Nodes of equal devices: `intra_node` links inside, `inter_node` between."""

    name: str
    description: str
    device: str
    devices_per_node: int
    intra_node: Link
    inter_node: Link

    def link_between(self, num_nodes: int) -> Link:
        """Return the slowest link that a group over `num_nodes` nodes crosses."""
        return self.intra_node if num_nodes <= 1 else self.inter_node


@cache
def all_topologies() -> dict[str, TopologySpec]:
    """Return every topology by name: one file each in `topologies/`."""
    topologies: dict[str, TopologySpec] = {}
    for stem, content in scan_yaml("foretoken.domain.hardware", "topologies"):
        origin = f"topologies/{stem}.yaml"
        topologies[stem] = schema.decode(
            TopologySpec, {"name": stem, **strip_sources(content, origin)}, origin
        )
    return topologies


def find_topology(name: str) -> TopologySpec:
    """Return the topology of that name.

    Raises:
        UnknownTopologyError: there is none; the message names the nearest.

    """
    topologies = all_topologies()
    if name not in topologies:
        raise UnknownTopologyError.named(name, topologies)
    return topologies[name]


def topology_of_device(device: str) -> TopologySpec:
    """Return the first topology (by name) made of that device.

    Raises:
        UnknownTopologyError: no topology file uses the device.

    """
    for topology in all_topologies().values():
        if topology.device == device:
            return topology
    raise UnknownTopologyError.named(device, all_topologies())
