"""The least time an operator can take on a device: its work over the device's limits."""

from dataclasses import dataclass

from foretoken.domain.estimate import DType, Phase
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.operator import Dims, OperatorSpec
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
    """Return the limits of a collective over `num_nodes` nodes; other dims may be columns."""
    link = topology.link_between(num_nodes)
    moved_bytes = spec.moved_bytes(dims, 1.0)
    return RooflineTerms(
        compute_us=0.0 * moved_bytes,
        memory_us=moved_bytes / link.bandwidth_bytes_per_s * US_PER_S,
        floor_us=link.latency_us,
    )
