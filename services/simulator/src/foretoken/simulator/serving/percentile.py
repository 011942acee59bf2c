"""Summaries of distributions, of plain and of weighted values."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.domain.report import Percentiles

_RATIOS = (0.5, 0.9, 0.95, 0.99, 1.0)


def summarize(values: ArrayLike, counts: ArrayLike | None = None) -> Percentiles:
    """Return mean and percentiles (linear between ranks) of values, each taken `counts` times."""
    observed = np.asarray(values, dtype=np.float64)
    times = np.ones(len(observed), dtype=np.int64) if counts is None else np.asarray(counts)
    observed, times = observed[times > 0], times[times > 0]
    if len(observed) == 0:
        return Percentiles()
    order = np.argsort(observed, kind="stable")
    observed, upto = observed[order], np.cumsum(times[order])
    num_values = int(upto[-1])
    p50, p90, p95, p99, largest = (_at(observed, upto, r * (num_values - 1)) for r in _RATIOS)
    mean = float(observed @ times[order] / num_values)
    return Percentiles(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)


def _at(observed: NDArray[np.float64], upto: NDArray[np.int64], rank: float) -> float:
    lower = int(rank)
    indices = np.searchsorted(upto, (lower, min(lower + 1, int(upto[-1]) - 1)), side="right")
    low, high = observed[indices]
    return float(low + (high - low) * (rank - lower))
