"""What requests arrive: when, how long their prompts are, how many tokens they ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.errors import FieldViolation, InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSpec:
    """A distribution of token counts: `fixed` (mean) or `uniform` (minimum to maximum)."""

    kind: str = "fixed"
    mean: int = 0
    minimum: int = 1
    maximum: int = 0

    def __post_init__(self) -> None:
        """Refuse negative lengths."""
        violations = [
            FieldViolation(name, "must not be negative")
            for name in ("mean", "minimum", "maximum")
            if getattr(self, name) < 0
        ]
        if violations:
            raise InvalidRequestError(f"length: {violations[0].field} is negative", violations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a resolved workload; times in s from the start."""

    arrival_s: float
    num_prefill_tokens: int
    num_decode_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """Arrivals and lengths, or a trace.

    `arrival` names a plug-in of `simulator/serving/arrivals` (`poisson`, `constant`, `trace`);
    `arrival_options` are its own knobs. A `trace` brings its own lengths; `trace_requests` holds
    them inline once loaded, so that a scenario is complete wherever it runs. `time_scale`
    stretches a trace's arrival times; `rate_rps` applies to synthetic arrivals.
    Prompts and answers are cut so that their sum is at most `max_tokens_per_request` (0: no limit).
    """

    arrival: str = "poisson"
    arrival_options: Mapping[str, str] = field(default_factory=dict)
    rate_rps: float = 1.0
    num_requests: int = 100
    prefill: LengthSpec = field(default_factory=lambda: LengthSpec(mean=512))
    decode: LengthSpec = field(default_factory=lambda: LengthSpec(mean=128))
    trace_path: str = ""
    trace_requests: tuple[Request, ...] = ()
    time_scale: float = 1.0
    max_tokens_per_request: int = 0

    def __post_init__(self) -> None:
        """Refuse rates and counts that mean nothing."""
        checks: dict[str, tuple[bool, str]] = {
            "rate_rps": (self.rate_rps > 0, "must be positive"),
            "num_requests": (self.num_requests >= 1, "must be at least 1"),
            "time_scale": (self.time_scale > 0, "must be positive"),
            "max_tokens_per_request": (
                self.max_tokens_per_request >= 0,
                "must not be negative; 0 is no limit",
            ),
        }
        violations = [
            FieldViolation(name, problem)
            for name, (is_legal, problem) in checks.items()
            if not is_legal
        ]
        if violations:
            first = violations[0]
            raise InvalidRequestError(f"workload: {first.field} {first.description}", violations)
