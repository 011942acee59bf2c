"""What a comparison says in words, and what to do about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Runs of one server on one workload, and steps of one run, differ by about this much.
NOTABLE_RATIO = 0.02
# Estimates that rest on measurements for less than this share of the time are spoken of.
_WELL_MEASURED_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing to know, most important first: what, and what to do about it (may be empty)."""

    component: str
    text: str
    advice: str = ""


def find_estimates(
    shares: Mapping[str, float], text: str, low_ratio: float, high_ratio: float
) -> Iterator[Finding]:
    """Yield what simulated times rest on, where that is not measurements.

    `shares` are those of the time by provenance, `low_ratio` and `high_ratio` the bounds of it over
    the estimate.
    """
    measured = sum(shares.get(name, 0.0) for name in ("measured", "interpolated"))
    if shares and measured < _WELL_MEASURED_SHARE:
        yield Finding(
            component="estimates",
            text=f"{text}, which may be off by {low_ratio - 1:+.0%} to {high_ratio - 1:+.0%}.",
            advice="Measure or import the operators of this device before anything else:"
            " `foretoken plan` says which, `foretoken profile` measures them.",
        )
