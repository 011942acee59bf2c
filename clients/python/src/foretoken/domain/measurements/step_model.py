"""A model of whole serving steps, learned from an engine's own records of them.

It stands above the operators: a kind of step takes `ratio` times what the operators and launches
are estimated to take, and `constant_us` more. It holds for what it was learned of, and nothing
else: the model, the engine, the device with its topology and the layout.
"""

from dataclasses import dataclass
from math import inf

from foretoken.domain.errors import FieldViolation, InvalidRequestError

# Every request decodes; prompts with decodes; prompts alone.
STEP_KINDS = ("decode", "mixed", "prefill")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKindModel:
    """What was learned of one of `STEP_KINDS`, and how far steps were off.

    Of steps that were left out nine in ten took between `low_ratio` and `high_ratio` of what the
    model says. The times are means over the steps, the errors means without their sign.
    """

    kind: str
    num_steps: int
    ratio: float
    constant_us: float
    low_ratio: float
    high_ratio: float
    measured_us: float
    raw_us: float
    corrected_us: float
    raw_error_ratio: float
    corrected_error_ratio: float
    left_out_error_ratio: float

    def __post_init__(self) -> None:
        """Refuse what makes steps take no time, or less."""
        violations = []
        if self.kind not in STEP_KINDS:
            violations.append(FieldViolation("kind", f"must be one of {', '.join(STEP_KINDS)}"))
        if self.num_steps < 1:
            violations.append(FieldViolation("num_steps", "must be at least 1"))
        if not 0 < self.ratio < inf:
            violations.append(FieldViolation("ratio", "must be positive and finite"))
        if not 0 <= self.constant_us < inf:
            violations.append(FieldViolation("constant_us", "must be finite and not negative"))
        if not 0 < self.low_ratio <= 1 <= self.high_ratio < inf:
            violations.append(FieldViolation("low_ratio", "must be at most 1, high_ratio at least"))
        if violations:
            raise InvalidRequestError.of_violations(violations, "step model")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """What was learned of an engine's steps, one entry for each kind that was seen often enough.

    `layout` are the degrees of an engine above 1 ("tp=2"); the device is the correction's.
    """

    model: str
    engine: str
    topology: str
    layout: str
    source: str
    kinds: tuple[StepKindModel, ...]

    def find(self, kind: str) -> StepKindModel | None:
        """Return what steps of a kind go by: prompts with decodes or alone.

        The two stand in for each other; None where nothing like it was seen.
        """
        by_name = {each.kind: each for each in self.kinds}
        other = {"mixed": "prefill", "prefill": "mixed"}.get(kind, kind)
        return by_name.get(kind) or by_name.get(other)
