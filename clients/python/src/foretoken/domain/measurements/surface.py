"""Latency of one operator over a whole grid of dimensions."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.axis import check_axes, count_points
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
)
from foretoken.domain.results.methods import ResultMethods

# A grid in one answer stays below a message's 16 MiB: six numbers of 8 bytes a point, and as many
# again for the dimensions of the nearest measured point; no operator has a dozen.
MAX_SURFACE_POINTS = 100_000


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
