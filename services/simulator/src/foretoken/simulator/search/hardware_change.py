"""Hardware of which a part is better by a factor: what operators take on it, and its predictor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import (
    Link,
    TopologySpec,
    topology_of_device,
)
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource

# Shorter times than any operator takes, in µs: what is divided by is never 0.
_LEAST_US = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareChange:
    """Devices and links of which each part is so many times what it is.

    `links` is the bandwidth of all links, within nodes and between them; their latencies stay.
    """

    links: float = 1.0
    memory_bandwidth: float = 1.0
    memory_capacity: float = 1.0
    arithmetic: float = 1.0

    @property
    def has_other_times(self) -> bool:
        """Whether operators take another time: capacity alone changes none."""
        return (self.links, self.memory_bandwidth, self.arithmetic) != (1.0, 1.0, 1.0)

    def change_device(self, device: DeviceSpec) -> DeviceSpec:
        """Return the device with its parts changed."""
        return replace(
            device,
            memory_bytes=device.memory_bytes * self.memory_capacity,
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s
            * self.memory_bandwidth,
            peak_flops_per_s={
                dtype: flops * self.arithmetic for dtype, flops in device.peak_flops_per_s.items()
            },
        )

    def change_topology(self, topology: TopologySpec) -> TopologySpec:
        """Return the topology with its links changed."""
        return replace(
            topology,
            intra_node=self._change_link(topology.intra_node),
            inter_node=self._change_link(topology.inter_node),
        )

    def time_ratio(self, table: OperatorTable, device: str, topology: str) -> Floats:
        """Return the time on the changed hardware over that on the real one, row by row.

        `topology` is the name of the links (empty: the device's first).

        Nobody has measured such hardware. An operator keeps the share that it reaches of its
        roofline, the larger of its arithmetic and its bytes, each over what the device can do: what
        is bound by a part gains until another binds. Of a collective the bytes go over the changed
        links and the latency stays.

        Raises:
            UnknownDeviceError, UnknownTopologyError: no such name.

        """
        spec = find_operator(table.operator)
        dims = {name: np.asarray(column) for name, column in table.columns.items()}
        if spec.is_collective:
            links = topology_of_device(device, topology)
            before, after = (
                _collective_us(spec, dims, each, table.num_rows)
                for each in (links, self.change_topology(links))
            )
        else:
            found = find_device(device)
            before, after = (
                _compute_us(spec, dims, table, each) for each in (found, self.change_device(found))
            )
        ratio: Floats = np.where(before > 0.0, after / np.maximum(before, _LEAST_US), 1.0)
        return np.broadcast_to(ratio, (table.num_rows,))

    def _change_link(self, link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.links)


# What a buyer compares: a generation of links or of arithmetic is about twice the one before, one
# of memory about half as much again, in capacity, in bandwidth, or in both.
HARDWARE_CHANGES = {
    "links 2x": HardwareChange(links=2.0),
    "memory bandwidth +50 %": HardwareChange(memory_bandwidth=1.5),
    "memory capacity +50 %": HardwareChange(memory_capacity=1.5),
    "memory bandwidth and capacity +50 %": HardwareChange(
        memory_bandwidth=1.5, memory_capacity=1.5
    ),
    "arithmetic 2x": HardwareChange(arithmetic=2.0),
}


def _compute_us(
    spec: OperatorSpec, dims: Mapping[str, np.ndarray], table: OperatorTable, device: DeviceSpec
) -> Floats:
    """Return the roofline of the rows of a compute operator."""
    terms = compute_terms(spec, dims, table.dtype, table.phase, device)
    roofline: Floats = np.maximum(
        np.asarray(terms.compute_us, dtype=np.float64),
        np.asarray(terms.memory_us, dtype=np.float64),
    )
    return roofline


def _collective_us(
    spec: OperatorSpec, dims: Mapping[str, np.ndarray], topology: TopologySpec, num_rows: int
) -> Floats:
    """Return what the links let collectives take, each over as many nodes as it is."""
    num_nodes = np.broadcast_to(dims.get("num_nodes", np.ones(1)), (num_rows,))
    found = np.zeros(num_rows)
    for nodes in np.unique(num_nodes).tolist():
        rows = num_nodes == nodes
        of_rows = {
            name: np.broadcast_to(column, (num_rows,))[rows] for name, column in dims.items()
        }
        terms = collective_terms(spec, of_rows, int(nodes), topology)
        found[rows] = np.asarray(terms.memory_us, dtype=np.float64) + terms.floor_us
    return found


class FasterPredictor:
    """Answers for changed hardware, from the answers for the real one."""

    def __init__(self, predictor: LatencySource, change: HardwareChange) -> None:
        self._predictor, self._change = predictor, change

    def list_models(self) -> Sequence[ModelVersion]:
        """Return none: what is not real is not kept."""
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates of the changed hardware."""
        reply = self._predictor.predict(query)
        tables = tuple(
            _scaled(answer, self._change.time_ratio(table, query.device, query.topology))
            for table, answer in zip(query.tables, reply.tables, strict=True)
        )
        return replace(reply, tables=tables)


def _scaled(answer: LatencyColumns, ratio: Floats) -> LatencyColumns:
    return replace(
        answer,
        latency_us=answer.latency_us * ratio,
        low_us=answer.low_us * ratio,
        high_us=answer.high_us * ratio,
    )
