"""How far an answer rests on the workload's chance, and on the predictor's interval.

A search for every draw would take hundreds of runs. But the worst margin as a function of the
logarithm of the rate has much the same shape for all of them: the search has seen it near the
answer, and other requests, or slower steps, move it along the rate. So a run at a rate tells by its
margin how far its own answer is from there; a second one there corrects it.
"""

from collections.abc import Callable, Sequence
from math import pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.simulator.search.capacity.probe import Probe

Floats = NDArray[np.float64]

# The nominal confidence of the predictor's interval (docs/explanation/estimates.md).
PREDICTOR_CONFIDENCE = 0.9
# A step along the curve is at most this, in logarithms of the rate.
_MAX_STEP = 0.5
_LEAST_SLOPE = 1e-3


class MarginCurve(NamedTuple):
    """The worst margin by the logarithm of the rate: what a search saw, made to ascend.

    It is 0 at `root`.
    """

    log_rate: Floats
    margin: Floats
    root: float

    def distance(self, margin: float) -> float:
        """Return how far above its root the curve has a margin; beyond its ends it goes on."""
        ends = ((0, 1), (-2, -1))
        for (lower, upper), is_outside in zip(
            ends, (margin < self.margin[0], margin > self.margin[-1]), strict=True
        ):
            if is_outside:
                rise = self.margin[upper] - self.margin[lower]
                run = self.log_rate[upper] - self.log_rate[lower]
                end = 0 if lower == 0 else -1
                beyond = (margin - self.margin[end]) * run / rise
                return float(self.log_rate[end] + beyond - self.root)
        return float(np.interp(margin, self.margin, self.log_rate)) - self.root


def fit_curve(probes: Sequence[Probe]) -> MarginCurve:
    """Return the curve of the probes that were run whole, some of which meet the targets."""
    whole = sorted(
        {probe.log_rate: probe.verdict.margin for probe in probes if not probe.is_cut_short}.items()
    )
    log_rate, margin = (np.array(column) for column in zip(*whole, strict=True))
    # Rises by at least a little, so that each margin is at one place.
    margin = np.maximum.accumulate(margin - _LEAST_SLOPE * log_rate) + _LEAST_SLOPE * log_rate
    return MarginCurve(log_rate, margin, float(np.interp(0.0, margin, log_rate)))


def find_crossing(
    margin_at: Callable[[float], float],
    curve: MarginCurve,
    start: float,
    num_runs: int,
    tolerance: float = 0.0,
) -> float:
    """Return about the logarithm of the rate at which another load's margin is 0.

    `margin_at` runs it at a logarithm of a rate. Ends early where a step is below the tolerance.
    """
    below: tuple[float, float] | None = None
    above: tuple[float, float] | None = None
    at = start
    for _ in range(num_runs):
        margin = margin_at(at)
        if margin <= 0:
            below = max(below, (at, margin)) if below else (at, margin)
        else:
            above = min(above, (at, margin)) if above else (at, margin)
        if below and above and above[0] > below[0]:
            share = below[1] / (below[1] - above[1])
            following = below[0] + share * (above[0] - below[0])
        else:
            step = curve.distance(margin)
            following = at - min(max(step, -_MAX_STEP), _MAX_STEP)
        is_close = abs(following - at) < tolerance
        at = following
        if is_close:
            break
    return at


def sampling_width(log_rates: Sequence[float], num_independent: int, confidence: float) -> float:
    """Return half the width of the interval of one draw's answer, in logarithms of the rate.

    The answers of resamples scatter as that one does around the truth: Student's t with a degree of
    freedom for each independent resample but one.
    """
    if len(log_rates) < 2 or num_independent < 2:  # noqa: PLR2004 - a spread needs two
        return 0.0
    spread = float(np.std(log_rates, ddof=1))
    return student_quantile(confidence, num_independent - 1) * spread


def rescale_width(width: float, confidence: float) -> float:
    """Return a width of the predictor's interval at another confidence, errors being normal."""
    normal = NormalDist()
    wanted, nominal = (
        normal.inv_cdf(0.5 + level / 2) for level in (confidence, PREDICTOR_CONFIDENCE)
    )
    return width * wanted / nominal


def student_quantile(confidence: float, num_degrees: int) -> float:
    """Return the t that Student's distribution stays within, on both sides, so often."""
    low, high = 0.0, 1.0
    while _student_share(high, num_degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_share(middle, num_degrees) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_share(t: float, num_degrees: int) -> float:
    """Return P(|T| < t), by the sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = float(np.arctan(t / sqrt(num_degrees)))
    sine, cosine = float(np.sin(angle)), float(np.cos(angle))
    is_odd = num_degrees % 2
    total, term = 0.0, cosine if is_odd else 1.0
    for index in range(3 if is_odd else 2, num_degrees + 1, 2):
        total += term
        term *= cosine**2 * (index - 1) / index
    if is_odd:
        return 2 / pi * (angle + sine * total)
    return sine * total
