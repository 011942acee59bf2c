"""Corrections from a user's own end-to-end observations; always shown next to the raw figure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.step_model import StepModel
from foretoken.domain.requests.option import describe, flag, option
from foretoken.domain.results.methods import ResultMethods


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedCall:
    """An operator call, and how often it ran in what was observed."""

    call: OperatorCall
    count: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A time observed end to end, and the operator calls it is the sum of."""

    name: str
    observed_us: float
    calls: tuple[ObservedCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionRequest:
    """Observations on one device to learn a correction from.

    Without `by_group` one factor stretches all operators; with it each group of operators (gemm,
    attention, communication, elementwise, ...) has its own, drawn towards the common one as far
    as the observations are too few to tell. `steps` in place of observations were learned already,
    and are kept.
    """

    name: str = field(metadata=describe("Its name; one of that name is replaced.", argument="name"))
    device: str = field(metadata=describe("Device: see `foretoken list devices`."))
    observations: tuple[Observation, ...] = field(
        metadata=describe(
            "What was observed (JSON).", argument="observations", syntax="observations"
        )
    )
    topology: str = option("", "Topology, for collectives.")
    framework: str = option("", "Software whose measurements to use.")
    by_group: bool = flag(
        "A factor for each group of operators, as far as the observations can tell."
    )
    steps: StepModel | None = None

    def __post_init__(self) -> None:
        """Check what must be there."""
        settle_devices(self, "device")
        violations = []
        if not self.name:
            violations.append(FieldViolation("name", "must be set"))
        if not self.observations and self.steps is None:
            violations.append(FieldViolation("observations", "needs at least one"))
        if self.observations and self.steps is not None:
            violations.append(FieldViolation("steps", "go with no observations"))
        if self.steps is not None and not self.steps.kinds:
            violations.append(FieldViolation("steps.kinds", "needs at least one"))
        for index, observation in enumerate(self.observations):
            if not 0 < observation.observed_us < inf:
                field_name = f"observations[{index}].observed_us"
                violations.append(FieldViolation(field_name, "must be positive and finite"))
            if not observation.calls:
                violations.append(FieldViolation(f"observations[{index}].calls", "needs a call"))
            if not all(0 <= item.count < inf for item in observation.calls):
                reason = "a count must be finite and not negative"
                violations.append(FieldViolation(f"observations[{index}].calls", reason))
        if violations:
            raise InvalidRequestError.of_violations(violations, "correction")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectedObservation:
    """One observation with its raw and its corrected estimate.

    `left_out_us` is the estimate of a correction learned from the other observations; 0 where
    there are no others.
    """

    name: str
    observed_us: float
    raw_us: float
    corrected_us: float
    left_out_us: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Correction(ResultMethods):
    """Factors on estimates of one device, and the mean errors with and without.

    `factors` has one entry per group of operators, "" for every group without one. The errors are
    means over the observations; `left_out_error_ratio` (each predicted from the others) is the one
    to expect of a new observation, 0 with fewer than two. With `steps` it corrects whole steps
    instead of operators, and the errors are theirs.
    """

    name: str
    device: str
    created_at: str
    model_version: str
    factors: Mapping[str, float] = field(default_factory=dict)
    observations: tuple[CorrectedObservation, ...] = ()
    raw_error_ratio: float = 0.0
    corrected_error_ratio: float = 0.0
    left_out_error_ratio: float = 0.0
    steps: StepModel | None = None
