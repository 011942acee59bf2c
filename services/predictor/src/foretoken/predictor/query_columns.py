"""Columns of a query, checked against the operator they are of, and what its calls run on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import DType, OperatorTable, Phase
from foretoken.domain.measurements.surface import Axis
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.operators.spec.variant import least_element_bytes
from foretoken.predictor.roofline import Columns, IntColumn, Target

# Larger integers are not exact as floats, in which work is computed.
_DIM_MAX = 2**53


def read_columns(spec: OperatorSpec, given: Mapping[str, object]) -> Columns:
    """Return the columns as integers.

    Raises:
        InvalidRequestError: one violation per missing, unknown, ragged or illegal column, or per
            relation between columns that a row breaks.

    """
    violations = [
        FieldViolation(name, f"{spec.name} has no such dimension; it has {spec.dim_names}")
        for name in given
        if name not in spec.dim_names
    ]
    columns: dict[str, IntColumn] = {}
    for dim in spec.dims:
        if dim.name not in given:
            violations.append(FieldViolation(dim.name, f"missing ({dim.meaning})"))
            continue
        column = np.atleast_1d(np.asarray(given[dim.name]))
        reason = _reject(column, dim.minimum)
        if reason:
            violations.append(FieldViolation(dim.name, reason))
        else:
            columns[dim.name] = column.astype(np.int64)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        violations.append(FieldViolation("columns", f"lengths differ: {sorted(lengths)}"))
    elif not violations and lengths != {0}:
        violations = spec.find_contradictions(columns)
    if violations:
        raise InvalidRequestError.of_violations(violations, spec.name)
    return columns


def _reject(column: npt.NDArray[np.generic], minimum: int) -> str:
    if column.ndim != 1 or column.dtype.kind not in "iuf":
        return "must be a column of integers" if column.size else ""
    if column.dtype.kind == "f" and not (column == np.floor(column)).all():
        return "must be a column of integers"
    if column.size and column.min() < minimum:
        return f"must be at least {minimum}"
    if column.size and column.max() > _DIM_MAX:
        return f"must be at most {_DIM_MAX}"
    return ""


def grid_columns(axes: Sequence[Axis]) -> dict[str, IntColumn]:
    """Return the grid's points as columns by dimension, the last axis varying fastest."""
    meshes = np.meshgrid(*(axis.values for axis in axes), indexing="ij")
    return {
        axis.dim: mesh.reshape(-1).astype(np.int64) for axis, mesh in zip(axes, meshes, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Call:
    """A table of calls, and what they run on."""

    spec: OperatorSpec
    table: OperatorTable
    columns: Columns
    target: Target

    @property
    def read_ratio(self) -> float:
        """The part of the counted bytes that is read of narrower weights or a narrower cache."""
        dtype = self.target.dtype
        return least_element_bytes(dtype, self.table.variant) / dtype.num_bytes


def find_target(
    spec: OperatorSpec, device: str, topology: str, dtype: DType, phase: Phase
) -> Target:
    """Return the target; a collective without a named topology takes the device's first.

    Raises:
        UnknownDeviceError, UnknownTopologyError: no file of that name.

    """
    found = find_device(device)
    links = None
    if spec.is_collective:
        links = topology_of_device(found.name, topology)
    return Target(device=found, dtype=dtype, phase=phase, topology=links)
