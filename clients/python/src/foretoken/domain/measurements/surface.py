"""Latency of one operator over a grid of dimensions, given by axes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
)
from foretoken.domain.results.methods import ResultMethods


class Axis(Protocol):
    """Values of one dimension."""

    @property
    def dim(self) -> str:
        """Name of the dimension."""

    @property
    def values(self) -> tuple[int, ...]:
        """The values, ascending and distinct."""


def count_points(axes: Sequence[Axis]) -> int:
    """Return the points of the grid: all combinations of the values."""
    return prod(len(axis.values) for axis in axes)


def check_axes(axes: Sequence[Axis], max_points: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with the axes of a grid of at most `max_points`."""
    seen: set[str] = set()
    for index, axis in enumerate(axes):
        if axis.dim in seen:
            yield FieldViolation(f"axes[{index}].dim", f"{axis.dim} has an axis already")
        seen.add(axis.dim)
        if not axis.values or list(axis.values) != sorted(set(axis.values)):
            yield FieldViolation(f"axes[{index}].values", "needs values, ascending and distinct")
    num_points = count_points(axes)
    if num_points > max_points:
        yield FieldViolation("axes", f"{num_points:,} points; at most {max_points:,}")


# A grid in one answer stays below a message's 16 MiB: six numbers of 8 bytes a point, and as many
# again for the dimensions of the nearest measured point; no operator has a dozen.
MAX_SURFACE_POINTS = 80_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceAxis:
    """Values of one dimension, ascending."""

    dim: str
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceQuery:
    """Ask for an operator at all combinations of the values of its dimensions.

    Every dimension has an axis, a fixed one with a single value. The last axis varies fastest.
    """

    device: str
    operator: str
    dtype: DType
    axes: tuple[SurfaceAxis, ...]
    phase: Phase = Phase.FORWARD
    variant: str = ""
    kernel: str = ""
    topology: str = ""
    framework: str = ""
    model_version: str = ""
    correction: str = ""

    def __post_init__(self) -> None:
        """Check the axes."""
        settle_devices(self, "device")
        violations = list(check_axes(self.axes, MAX_SURFACE_POINTS))
        if violations:
            raise InvalidRequestError.of_violations(violations, "surface")

    @property
    def num_points(self) -> int:
        """Points of the grid."""
        return count_points(self.axes)

    def to_query(self, columns: Mapping[str, object]) -> LatencyQuery:
        """Return the query for the grid's points, given as columns."""
        table = OperatorTable(
            operator=self.operator,
            dtype=self.dtype,
            phase=self.phase,
            columns=columns,
            variant=self.variant,
            kernel=self.kernel,
        )
        return LatencyQuery(
            device=self.device,
            tables=(table,),
            topology=self.topology,
            framework=self.framework,
            model_version=self.model_version,
            correction=self.correction,
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LatencySurface(ResultMethods):
    """Estimates on the grid of a `SurfaceQuery`, row by row with the last axis fastest."""

    axes: tuple[SurfaceAxis, ...]
    estimates: LatencyColumns
    model_version: str
