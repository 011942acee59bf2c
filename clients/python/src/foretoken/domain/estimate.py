"""Questions to the predictor and its answers, one call at a time or in columns."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretoken.domain.units import Quantity


class DType(enum.Enum):
    """Number format of an operator's inputs."""

    FP32 = 1
    TF32 = 2
    FP16 = 3
    BF16 = 4
    FP8 = 5
    INT8 = 6
    INT4 = 7
    FP4 = 8

    @property
    def num_bytes(self) -> float:
        """Bytes one element occupies."""
        return _DTYPE_BYTES[self]

    def bytes_of(self, num_elements: Quantity) -> Quantity:
        """Return the bytes of that many elements; integers stay integers."""
        return num_elements * round(8 * self.num_bytes) // 8


_DTYPE_BYTES = {
    DType.FP32: 4.0,
    DType.TF32: 4.0,
    DType.FP16: 2.0,
    DType.BF16: 2.0,
    DType.FP8: 1.0,
    DType.INT8: 1.0,
    DType.INT4: 0.5,
    DType.FP4: 0.5,
}


class Phase(enum.Enum):
    """Which pass of the computation an operator call belongs to."""

    FORWARD = 1
    BACKWARD = 2


class Provenance(enum.Enum):
    """What an estimate rests on, from the strongest to the weakest."""

    MEASURED = 1
    INTERPOLATED = 2
    EXTRAPOLATED = 3
    ANALYTICAL = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTable:
    """Many calls of one operator, as columns of equal length, one per dimension."""

    operator: str
    dtype: DType
    phase: Phase = Phase.FORWARD
    columns: Mapping[str, Quantity]

    @property
    def num_rows(self) -> int:
        """Number of calls in the table."""
        return len(next(iter(self.columns.values()))) if self.columns else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyQuery:
    """Ask how long operator calls take on one device.

    `framework` narrows the measurements to one software stack ("vllm 0.19"); empty takes any.
    With `refuse_extrapolation` a call outside the measured coverage is an `OutOfCoverageError`.
    """

    device: str
    tables: tuple[OperatorTable, ...]
    topology: str = ""
    framework: str = ""
    refuse_extrapolation: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyColumns:
    """Estimates for one `OperatorTable`, row by row.

    `latency_us`, `low_us`, `high_us` are float columns, the bounds a nominal 90 % interval;
    `provenance` holds `Provenance` values as integers.
    """

    latency_us: Quantity
    low_us: Quantity
    high_us: Quantity
    provenance: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyReply:
    """Answers in the order of the query's tables, and the model version that gave them."""

    model_version: str
    tables: tuple[LatencyColumns, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyEstimate:
    """How long one operator call takes, how sure we are, and why."""

    latency_us: float
    low_us: float
    high_us: float
    provenance: Provenance
    model_version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCall:
    """One call of one operator with concrete dimensions."""

    operator: str
    dtype: DType
    phase: Phase = Phase.FORWARD
    dims: Mapping[str, int] = field(default_factory=dict)


def table_of_calls(calls: Sequence[OperatorCall]) -> OperatorTable:
    """Return the table of calls that share operator, dtype and phase."""
    first = calls[0]
    columns = {name: [call.dims[name] for call in calls] for name in first.dims}
    return OperatorTable(
        operator=first.operator, dtype=first.dtype, phase=first.phase, columns=columns
    )
