"""The least time an operator can take on a device: its work over the device's limits."""

from dataclasses import dataclass

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import Dims, OperatorSpec
from foretoken.domain.units import US_PER_S, Quantity


@dataclass(frozen=True, slots=True)
class RooflineTerms:
    """Time limits of an operator in µs: the roofline is the larger of compute and memory.

    `floor_us` is the launch or link latency, which adds to it in practice.
    """

    compute_us: Quantity
    memory_us: Quantity
    floor_us: float


def compute_terms(
    spec: OperatorSpec, dims: Dims, dtype: DType, phase: Phase, device: DeviceSpec
) -> RooflineTerms:
    """Return the limits of a compute operator; dims may be columns."""
    ratio = spec.work_ratio(phase)
    flops = spec.flops(dims, dtype.num_bytes) * ratio
    moved_bytes = spec.moved_bytes(dims, dtype.num_bytes) * ratio
    return RooflineTerms(
        compute_us=flops / device.peak_flops(dtype) * US_PER_S,
        memory_us=moved_bytes / device.memory_bandwidth_bytes_per_s * US_PER_S,
        floor_us=device.launch_latency_us,
    )


def collective_terms(
    spec: OperatorSpec, dims: Dims, num_nodes: int, topology: TopologySpec
) -> RooflineTerms:
    """Return the limits of a collective over `num_nodes` nodes; other dims may be columns.

    A ring crosses each node once and takes all its network ports, so between nodes the ports of a
    group's devices count together, up to what one device takes from its own node. In an exchange
    between pairs every device sends by its own port what is for other nodes, after the rest. A node
    with fewer ports than the group has devices there has no more of them to take.
    Where links are of pairs of devices, a group has those between its own.
    """
    link = topology.link_between(num_nodes)
    moved_bytes = spec.moved_bytes(dims, 1.0)
    us_per_byte = US_PER_S / link.bandwidth_bytes_per_s
    inside = US_PER_S / topology.intra_node.bandwidth_bytes_per_s
    if topology.links_pairs:
        num_links = topology.devices_per_node - 1
        inside = inside * num_links / _larger(1, dims["devices_per_node"] - 1)
        us_per_byte = inside if num_nodes <= 1 else us_per_byte
    if num_nodes > 1 and topology.num_ports < topology.devices_per_node:
        # Devices of the group take turns at the ports there are.
        us_per_byte = us_per_byte * _larger(1.0, dims["devices_per_node"] / topology.num_ports)
    if num_nodes > 1 and spec.shares_node_links:
        us_per_byte = _larger(us_per_byte / dims["devices_per_node"], inside)
    elif num_nodes > 1:
        away = _share_for_other_nodes(dims)
        us_per_byte = us_per_byte * away + inside * (1 - away)
    return RooflineTerms(
        compute_us=0.0 * moved_bytes,
        memory_us=moved_bytes * us_per_byte,
        floor_us=link.latency_us,
    )


def _share_for_other_nodes(dims: Dims) -> Quantity:
    """Return the part of what a rank sends, as much to every other, that leaves its node."""
    num_ranks = dims["devices_per_node"] * dims["num_nodes"]
    return (num_ranks - dims["devices_per_node"]) / _larger(num_ranks - 1, 1)


def _larger(first: Quantity, second: Quantity) -> Quantity:
    """Return the larger of two quantities, elementwise for columns."""
    return (first + second + abs(first - second)) / 2
