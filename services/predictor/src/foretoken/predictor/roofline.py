"""Time limits of whole columns of operator calls: the numpy side of the domain's roofline."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import OperatorSpec

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64]
Columns = Mapping[str, IntColumn]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the calls of a table run on, and how. Only collectives need a topology."""

    device: DeviceSpec
    dtype: DType
    phase: Phase = Phase.FORWARD
    topology: TopologySpec | None = None

    @property
    def place(self) -> str:
        """The name of the device, of a topology that of its devices."""
        return self.topology.device if self.topology else self.device.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Time limits per call, in µs."""

    compute_us: FloatColumn
    memory_us: FloatColumn
    floor_us: FloatColumn

    @property
    def roofline_us(self) -> FloatColumn:
        """The larger of the compute and the memory (or link) limit."""
        return np.maximum(self.compute_us, self.memory_us)

    @property
    def base_us(self) -> FloatColumn:
        """The latency models start from: launch floor plus roofline. Always positive."""
        return self.floor_us + self.roofline_us


def compute_limits(spec: OperatorSpec, columns: Columns, target: Target) -> Limits:
    """Return the limits of every call.

    Raises:
        InvalidRequestError: the device cannot compute in that format, or a collective is asked
            for without a topology.

    """
    if spec.is_collective:
        return _collective_limits(spec, columns, target)
    terms = compute_terms(spec, as_reals(columns), target.dtype, target.phase, target.device)
    num_rows = len(next(iter(columns.values())))
    return Limits(
        compute_us=_as_column(terms.compute_us, num_rows),
        memory_us=_as_column(terms.memory_us, num_rows),
        floor_us=_as_column(terms.floor_us, num_rows),
    )


def as_reals(columns: Columns) -> Mapping[str, FloatColumn]:
    """Return the columns as floats: products of large dimensions overflow 64-bit integers."""
    return {name: column.astype(np.float64) for name, column in columns.items()}


def _collective_limits(spec: OperatorSpec, columns: Columns, target: Target) -> Limits:
    if target.topology is None:
        raise InvalidRequestError.of_field("topology", f"{spec.name} needs a topology")
    num_nodes = columns["num_nodes"]
    # A group inside one node crosses only its links; any other is bound by those between nodes.
    reals = as_reals(columns)
    inside = collective_terms(spec, reals, 1, target.topology)
    across = collective_terms(spec, reals, 2, target.topology)
    is_inside = num_nodes <= 1
    memory_us = np.where(is_inside, inside.memory_us, across.memory_us)
    floor_us = np.where(is_inside, inside.floor_us, across.floor_us)
    num_rows = len(num_nodes)
    return Limits(
        compute_us=np.zeros(num_rows),
        memory_us=_as_column(memory_us, num_rows),
        floor_us=_as_column(floor_us, num_rows),
    )


def _as_column(value: object, num_rows: int) -> FloatColumn:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (num_rows,))
