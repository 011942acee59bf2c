"""What physics says of rows: the time no device gets below, and a plain estimate of the time."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.catalog.dims import Columns, Floats
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.operators.spec.variant import least_element_bytes
from foretoken.domain.units import US_PER_S


@dataclass(frozen=True, slots=True)
class Subject:
    """What decides, in addition to operator and dimensions, how fast a row can be."""

    device: str
    topology: str | None
    dtype: str
    phase: str
    variant: str | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of rows in µs.

    `compute_us` and `memory_us` are the work at the device's peak and the traffic at its bandwidth,
    `link_us` that of a collective (then the other two are 0). `cached_us` of the memory traffic may
    have been spared by the cache. `floor_us` is the launch or link latency. Of a device that has a
    format but whose file lacks its peak, `compute_us` is what a wider format takes, and no limit.
    """

    compute_us: Floats
    memory_us: Floats
    link_us: Floats
    cached_us: float
    floor_us: Floats
    has_peak: bool = True

    @property
    def exact_us(self) -> Floats:
        """What work and messages alone take, 0 where the peak is not known."""
        return np.maximum(self.compute_us if self.has_peak else 0.0, self.link_us)

    @property
    def least_us(self) -> Floats:
        """The roofline, with everything that the last-level cache holds already there."""
        return np.maximum(self.exact_us, self.memory_us - self.cached_us)

    @property
    def work_us(self) -> Floats:
        """The roofline."""
        return np.maximum(np.maximum(self.compute_us, self.memory_us), self.link_us)


def bounds_of(spec: OperatorSpec, columns: Columns, subject: Subject) -> Bounds:
    """Return the limits of rows of one operator measured on one subject.

    Raises:
        UnknownDeviceError, UnknownTopologyError: the subject names one without a file.
        InvalidRequestError: the variant cannot be read, or the device computes in no such format.

    """
    device = find_device(subject.device)
    # Work counts overflow 64-bit integers from about 2e18 operations on.
    dims = {name: column.astype(np.float64) for name, column in columns.items()}
    if spec.is_collective:
        return _collective_bounds(spec, dims, subject.topology or "")
    dtype = DType[subject.dtype.upper()]
    element_bytes = least_element_bytes(dtype, subject.variant)
    ratio = spec.work_ratio(Phase[subject.phase.upper()])
    compute_us = spec.flops(dims, element_bytes) * (ratio / device.peak_flops(dtype) * US_PER_S)
    us_per_byte = US_PER_S / device.memory_bandwidth_bytes_per_s
    memory_us = spec.moved_bytes(dims, element_bytes) * (ratio * us_per_byte)
    num_rows = len(next(iter(dims.values())))
    return Bounds(
        compute_us=np.broadcast_to(np.asarray(compute_us, dtype=np.float64), num_rows),
        memory_us=np.broadcast_to(np.asarray(memory_us, dtype=np.float64), num_rows),
        link_us=np.zeros(1),
        cached_us=device.l2_cache_bytes * us_per_byte,
        floor_us=np.full(1, device.launch_latency_us),
        has_peak=device.knows_peak(dtype),
    )


def _collective_bounds(spec: OperatorSpec, dims: Mapping[str, Floats], topology: str) -> Bounds:
    links = find_topology(topology)
    num_nodes = dims["num_nodes"]
    link_us, floor_us = np.zeros(len(num_nodes)), np.zeros(len(num_nodes))
    for number in np.unique(num_nodes).astype(int).tolist():
        rows = num_nodes == number
        terms = collective_terms(spec, {name: c[rows] for name, c in dims.items()}, number, links)
        link_us[rows], floor_us[rows] = terms.memory_us, terms.floor_us
    nothing = np.zeros(1)
    return Bounds(nothing, nothing, link_us, 0.0, floor_us)
