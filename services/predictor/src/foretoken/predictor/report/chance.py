"""How often the truth should be in its interval, and how much of a miss chance explains."""

NOMINAL_COVERAGE_RATIO = 0.9
_CONFIDENCE = 0.95


def coverage_by_chance(num_points: int) -> tuple[float, float]:
    """Return the range that 95 % of coverages fall in, were every interval a true 90 % one.

    That of the binomial distribution: points that err together, as neighbours do, stray further.
    """
    from scipy.stats import binom  # type: ignore[import-untyped]

    low, high = binom.interval(_CONFIDENCE, num_points, NOMINAL_COVERAGE_RATIO)
    return float(low) / num_points, float(high) / num_points
