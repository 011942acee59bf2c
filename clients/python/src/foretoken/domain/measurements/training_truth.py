"""What a user measured of training: times of modules, and the calibration from whole steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTime:
    """Time of a module for one micro batch on one rank, in µs.

    `module` names it as the profile does (`attn_q`, `layers.3.mlp`, `lm_head`), `layer` is the one
    it belongs to (-1: alike in all layers, or in none). Without `backward_us` (0) the backward pass
    takes twice the forward one. `communication_us` is what of `forward_us` it communicates: that is
    not counted a second time.
    """

    module: str
    micro_batch_size: int
    forward_us: float
    backward_us: float = 0.0
    communication_us: float = 0.0
    layer: int = -1
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTimes:
    """A layer-level profile of one model on one device: FASOP's ProfileDB, or an FX graph's.

    `sequence_length` 0, no `dtype`, an empty `model` or `device` mean that the source does not say.
    `has_communication` tells that times hold tensor-parallel collectives.

    `measures` says what a time is: that of `modules` alone, or that of `intervals`, which run from
    the end of the module before to the module's own end and hold all that lies between.
    """

    source: str
    model: str = ""
    device: str = ""
    tp: int = 1
    sequence_length: int = 0
    dtype: DType | None = None
    has_communication: bool = False
    measures: str = "modules"
    times: tuple[ModuleTime, ...] = ()

    def __post_init__(self) -> None:
        """Refuse times no module can take."""
        settle_devices(self, "device")
        violations = [
            FieldViolation(f"times[{index}]", reason)
            for index, time in enumerate(self.times)
            for reason in _refuse_time(time)
        ]
        if self.measures not in MEASURES:
            violations.append(FieldViolation("measures", f"must be one of {', '.join(MEASURES)}"))
        if self.tp < 1:
            violations.append(FieldViolation("tp", "must be at least 1"))
        if violations:
            raise InvalidRequestError.of_violations(violations, f"module times {self.source}")


# What the times of a profile can be.
MEASURES = ("modules", "intervals")


def _refuse_time(time: ModuleTime) -> Iterator[str]:
    if not (0 <= time.forward_us < math.inf and 0 <= time.backward_us < math.inf):
        yield "times must be finite and not negative"
    elif not 0 <= time.communication_us <= time.forward_us:
        yield "communication is a part of the forward time"
    if time.micro_batch_size < 1:
        yield "micro_batch_size must be at least 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCalibration:
    """A correction of the simulated step by steps that were measured.

    `forward_gap_us` and `backward_gap_us` are added to each layer of a micro batch, `step_gap_us`
    to the step, in µs; all of it, gaps included, is multiplied by `step_factor`.
    """

    source: str = ""
    forward_gap_us: float = 0.0
    backward_gap_us: float = 0.0
    step_gap_us: float = 0.0
    step_factor: float = 1.0
    num_steps: int = 0
    error_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a calibration that turns time back."""
        checks = {
            "forward_gap_us": self.forward_gap_us >= 0,
            "backward_gap_us": self.backward_gap_us >= 0,
            "step_gap_us": self.step_gap_us >= 0,
            "step_factor": 0 < self.step_factor < float("inf"),
        }
        violations = [
            FieldViolation(name, "must not be negative, and a factor must be positive")
            for name, is_legal in checks.items()
            if not is_legal
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, "calibration")
