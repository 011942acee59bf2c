"""Questions to the predictor and its answers, one call at a time or in columns; and why."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from foretoken.domain.alias import settle_devices
from foretoken.domain.measurements.step_model import StepModel
from foretoken.domain.results.methods import ResultMethods
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

    @property
    def kept_in_training(self) -> "DType":
        """Format that training keeps values in: 16 bit for what it multiplies in 8."""
        return DType.BF16 if self is DType.FP8 else self

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
    """What an estimate rests on, from the strongest to the weakest.

    Transferred: the operator was measured on other devices, or on this one in another number
    format only. Analytical: nobody measured it; the roofline and what other operators make of it.
    """

    MEASURED = 1
    INTERPOLATED = 2
    EXTRAPOLATED = 3
    TRANSFERRED = 5
    ANALYTICAL = 4

    @property
    def is_covered(self) -> bool:
        """Whether measurements of the device itself surround the call."""
        return self in (Provenance.MEASURED, Provenance.INTERPOLATED)


# As columns of answers hold them.
COVERED_PROVENANCES = tuple(member.value for member in Provenance if member.is_covered)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTable:
    """Many calls of one operator, as columns of equal length, one per dimension.

    `variant` is the special case asked about as "key=value;..." ("quant=fp8_block"; see
    `operators/spec/variant.py`), empty the plain one. `kernel` is the kernel source
    ("flashinfer"); empty the one an engine would choose, the fastest measured at each point. A
    kernel or a variant of which there is nothing is an error, but where the table is `tentative`:
    then it is answered by what is nearest, with a wide interval.
    """

    operator: str
    dtype: DType
    phase: Phase = Phase.FORWARD
    columns: Mapping[str, Quantity]
    variant: str = ""
    kernel: str = ""
    tentative: bool = False

    @property
    def num_rows(self) -> int:
        """Number of calls in the table."""
        return len(next(iter(self.columns.values()))) if self.columns else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyQuery:
    """Ask how long operator calls take on one device.

    `framework` narrows the measurements to one software stack ("vllm 0.19"); empty takes any, those
    of `preferred_framework` ("vllm 0.14-0.16" is a range of versions) first, then those of its
    nearest version, then another's in a wider interval.
    With `refuse_extrapolation` a call outside the measured coverage is an `OutOfCoverageError`.
    `model_version` pins the models that answer; empty takes the active ones. With
    `prefer_measured` a point that was measured is answered by its measurement alone, else by that
    and the model around it. `correction` names a correction to apply; empty applies none.
    With `sustained` calls take what they take in work that lasts, where power slows a device, not
    in a burst; `power_limit_w` is what each device is limited to then (0: what it is sold with).
    """

    device: str
    tables: tuple[OperatorTable, ...]
    topology: str = ""
    framework: str = ""
    preferred_framework: str = ""
    refuse_extrapolation: bool = False
    model_version: str = ""
    prefer_measured: bool = False
    correction: str = ""
    sustained: bool = False
    power_limit_w: float = 0.0

    def __post_init__(self) -> None:
        """Put the device's own name in place of another of its names."""
        settle_devices(self, "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyColumns:
    """Estimates for one `OperatorTable`, row by row.

    `latency_us`, `low_us`, `high_us` are float columns, the bounds a nominal 90 % interval;
    `provenance` holds `Provenance` values as integers. `nearest` are the dimensions of the nearest
    measured point, `nearest_us` what it took, `nearest_octaves` how far it is in the dimension that
    differs most, in factors of two (infinite where nothing was measured; then the others are 0).
    `basis` says in words what the table's estimates rest on, `other_framework` whose measurements
    stand in for those of the software asked for or preferred (empty: its own, or none was named).
    `correction_factor` is what a correction has multiplied all three times with.
    """

    latency_us: Quantity
    low_us: Quantity
    high_us: Quantity
    provenance: Quantity
    nearest: Mapping[str, Quantity] = field(default_factory=dict)
    nearest_us: Quantity = ()
    nearest_octaves: Quantity = ()
    basis: str = ""
    other_framework: str = ""
    correction_factor: float = 1.0

    @property
    def raw_latency_us(self) -> Quantity:
        """The estimates before any correction."""
        return self.latency_us / self.correction_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyReply:
    """Answers in the order of the query's tables, and the model version that gave them.

    `steps` are of the query's correction, and not in the answers: they correct whole steps.
    """

    model_version: str
    tables: tuple[LatencyColumns, ...]
    steps: StepModel | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LatencyEstimate(ResultMethods):
    """How long one operator call takes, how sure we are, and why; see `LatencyColumns`.

    `nearest` is empty where nothing was measured.
    """

    latency_us: float
    low_us: float
    high_us: float
    provenance: Provenance
    model_version: str = ""
    basis: str = ""
    nearest: Mapping[str, int] = field(default_factory=dict)
    nearest_us: float = 0.0
    nearest_octaves: float = 0.0
    correction_factor: float = 1.0

    @property
    def raw_latency_us(self) -> float:
        """The estimate before any correction."""
        return self.latency_us / self.correction_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCall:
    """One call of one operator with concrete dimensions.

    `variant` and `kernel` are those of `OperatorTable`.
    """

    operator: str
    dtype: DType
    phase: Phase = Phase.FORWARD
    dims: Mapping[str, int] = field(default_factory=dict)
    variant: str = ""
    kernel: str = ""


def table_of_calls(calls: Sequence[OperatorCall]) -> OperatorTable:
    """Return the table of calls that share all but the values of their dimensions."""
    first = calls[0]
    columns = {name: [call.dims[name] for call in calls] for name in first.dims}
    return OperatorTable(
        operator=first.operator,
        dtype=first.dtype,
        phase=first.phase,
        columns=columns,
        variant=first.variant,
        kernel=first.kernel,
    )


def pick_estimate(reply: LatencyReply, table: int = 0, row: int = 0) -> LatencyEstimate:
    """Return one row of a reply."""
    columns = reply.tables[table]
    is_measured_near = bool(columns.nearest) and isfinite(columns.nearest_octaves[row])
    estimate = LatencyEstimate(
        latency_us=float(columns.latency_us[row]),
        low_us=float(columns.low_us[row]),
        high_us=float(columns.high_us[row]),
        provenance=Provenance(int(columns.provenance[row])),
        model_version=reply.model_version,
        basis=columns.basis,
        correction_factor=columns.correction_factor,
    )
    if not is_measured_near:
        return estimate
    return replace(
        estimate,
        nearest={name: int(column[row]) for name, column in columns.nearest.items()},
        nearest_us=float(columns.nearest_us[row]),
        nearest_octaves=float(columns.nearest_octaves[row]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberAnswer:
    """What one way of estimating says of the call, and its share in the answer (log space)."""

    name: str
    latency_us: float
    weight_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """By what factor a feature moves the trees' answer away from their average."""

    feature: str
    value: float
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredNeighbour:
    """A measured point near the call."""

    dims: Mapping[str, int]
    latency_us: float
    distance_octaves: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(ResultMethods):
    """One estimate and what it is made of, the strongest first in every list.

    `floor_us` is what launching costs, `compute_us` and `memory_us` (links, for a collective) the
    device's limits; `efficiency_ratio` the larger of the two over the estimate. `tier` says how the
    call lies to what was measured ("inside", "gap", "new configuration", "beyond", "unmeasured").
    """

    estimate: LatencyEstimate
    floor_us: float
    compute_us: float
    memory_us: float
    efficiency_ratio: float
    tier: str
    members: tuple[MemberAnswer, ...] = field(default_factory=tuple)
    contributions: tuple[Contribution, ...] = field(default_factory=tuple)
    neighbours: tuple[MeasuredNeighbour, ...] = field(default_factory=tuple)
