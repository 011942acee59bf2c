"""Service-level objectives of an inference deployment."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits one request must meet, in ms; 0 means no limit. See STYLE.md for the terms.

    A request meets `itl_ms` when the `itl_percentile` of its own token gaps does.
    """

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    itl_ms: float = 0.0
    e2e_latency_ms: float = 0.0
    itl_percentile: float = 99.0
