"""Service-level objectives of an inference deployment."""

from dataclasses import dataclass, field

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.option import option


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits one request must meet, in ms; 0 means no limit; docs/reference/terms.md defines them.

    A request meets `itl_ms` when the `itl_percentile` of its own token gaps does.
    """

    ttft_ms: float = option(0.0, "time to the first token")
    tpot_ms: float = option(0.0, "time per output token")
    itl_ms: float = option(0.0, "gap between tokens, at `itl_percentile` of the request's own")
    e2e_latency_ms: float = option(0.0, "time to the last token")
    itl_percentile: float = option(99.0, "of the gaps")

    def __post_init__(self) -> None:
        """Refuse limits that no request could meet and percentiles there are not."""
        violations = [
            FieldViolation(name, "must not be negative; 0 is no limit")
            for name in LIMITED
            if not getattr(self, name) >= 0
        ]
        if not 0 <= self.itl_percentile <= 100:  # noqa: PLR2004 - a percentile's own bounds
            violations.append(FieldViolation("itl_percentile", "must be between 0 and 100"))
        if violations:
            first = violations[0]
            raise InvalidRequestError(f"slo: {first.field} {first.description}", violations)

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return any(getattr(self, name) for name in LIMITED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SloClass:
    """Requests with limits of their own.

    Of synthetic requests `share_ratio` belong to the class; those of a trace name theirs. Of
    waiting requests those of the higher `priority` go first where the scheduler knows priorities.
    """

    name: str
    slo: Slo = field(default_factory=Slo)
    share_ratio: float = 0.0
    priority: int = 0

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        if not 0 <= self.share_ratio <= 1:
            raise InvalidRequestError.of_field("share_ratio", "must be between 0 and 1")
