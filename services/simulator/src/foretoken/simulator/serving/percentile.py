"""Summaries of distributions, of plain and of weighted values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.domain.results.report import Histogram, Percentiles

Floats = NDArray[np.float64]

_PERCENTS = (50, 90, 95, 99, 100)
# Room for a count and a value in one integer; the value has 43 bits, 2.4 hours in ns.
_COUNT_BITS = 20
# Ranges of a histogram; whole numbers up to this many have one each.
_MAX_RANGES = 64


def summarize(values: ArrayLike, counts: ArrayLike | None = None) -> Percentiles:
    """Return mean and percentiles (linear between ranks) of values, each taken `counts` times."""
    return describe(values, counts, ())[0]


def describe(
    values: ArrayLike, counts: ArrayLike | None, percents: Sequence[float], scale: float = 1.0
) -> tuple[Percentiles, tuple[float, ...]]:
    """Return the summary of values times `scale`, and their percentiles at `percents`.

    The second is empty where nothing was observed.
    """
    wanted = np.array((*_PERCENTS, *percents)) / 100
    if counts is None:
        observed = np.sort(np.asarray(values, dtype=np.float64))
        if len(observed) == 0:
            return Percentiles(), ()
        mean = float(observed.mean())
        found = _between_ranks(observed, wanted * (len(observed) - 1))
    else:
        observed, upto = _sort_values(values, counts)
        if len(observed) == 0:
            return Percentiles(), ()
        mean = float(observed @ np.diff(upto, prepend=0) / upto[-1])
        found = _between_counted_ranks(observed, upto, wanted * (upto[-1] - 1))
    p50, p90, p95, p99, largest, *quantiles = (found * scale).tolist()
    summary = Percentiles(mean=mean * scale, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)
    return summary, tuple(quantiles)


def count_whole(values: ArrayLike, weights: ArrayLike | None = None) -> tuple[Floats, Floats]:
    """Return the distinct values of whole numbers from 0 on, ascending, and how often each is."""
    counts = np.bincount(np.asarray(values), None if weights is None else np.asarray(weights))
    distinct = np.flatnonzero(counts)
    return distinct.astype(np.float64), counts[distinct].astype(np.float64)


def summarize_over_time(values: ArrayLike, durations: ArrayLike) -> Percentiles:
    """Return mean and percentiles of a whole number that stayed at each value for a time.

    A percentile is the least value that was not exceeded for that share of the time.
    """
    distinct, times = count_whole(values, durations)
    if len(distinct) == 0 or not times.sum() > 0:
        return Percentiles()
    upto = np.cumsum(times)
    last = len(distinct) - 1
    places = np.searchsorted(upto, np.array(_PERCENTS) / 100 * upto[-1])
    p50, p90, p95, p99, largest = distinct[np.minimum(places, last)].tolist()
    mean = float(distinct @ times / upto[-1])
    return Percentiles(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)


def make_histogram(distinct: Floats, counts: Floats) -> Histogram:
    """Return the histogram of distinct whole numbers and how often each was.

    Each has a range of its own where they are close together, else the ranges widen geometrically.
    """
    if len(distinct) == 0:
        return Histogram()
    lowest, highest = int(distinct[0]), int(distinct[-1])
    edges = np.arange(lowest, highest + 2, dtype=np.float64)
    if len(edges) > _MAX_RANGES + 1:
        widening = np.geomspace(max(lowest, 1), highest + 1, _MAX_RANGES)
        edges = np.unique(np.append(np.floor(widening[:-1]), (lowest, highest + 1)))
    shares, _ = np.histogram(distinct, edges, weights=counts)
    return Histogram(edges=tuple(edges.tolist()), shares=tuple((shares / counts.sum()).tolist()))


def _sort_values(values: ArrayLike, counts: ArrayLike) -> tuple[Floats, Floats]:
    """Return the values that occur, ascending, and how many there are up to each."""
    observed, times = np.asarray(values), np.asarray(counts)
    occurs = times > 0
    observed, times = observed[occurs], times[occurs]
    if _can_pack(observed, times):
        # Sorting one column of numbers is several times as fast as an order for two.
        packed = (observed.astype(np.int64) << _COUNT_BITS) | times
        packed.sort()
        observed, times = packed >> _COUNT_BITS, packed & ((1 << _COUNT_BITS) - 1)
    else:
        order = np.argsort(observed)
        observed, times = observed[order], times[order]
    return observed.astype(np.float64), np.cumsum(times, dtype=np.float64)


def _can_pack(observed: NDArray[Any], times: NDArray[Any]) -> bool:
    """Return whether value and count fit into one integer, the value first."""
    are_whole = all(np.issubdtype(column.dtype, np.integer) for column in (observed, times))
    return (
        are_whole
        and len(observed) > 0
        and observed.min() >= 0
        and int(observed.max()) < 1 << (63 - _COUNT_BITS)
        and int(times.max()) < 1 << _COUNT_BITS
    )


def _between_ranks(observed: Floats, ranks: Floats) -> Floats:
    lower = ranks.astype(np.int64)
    low, high = observed[lower], observed[np.minimum(lower + 1, len(observed) - 1)]
    return np.asarray(low + (high - low) * (ranks - lower))


def _between_counted_ranks(observed: Floats, upto: Floats, ranks: Floats) -> Floats:
    lower = np.floor(ranks)
    low = observed[np.searchsorted(upto, lower, side="right")]
    high = observed[np.searchsorted(upto, np.minimum(lower + 1, upto[-1] - 1), side="right")]
    return np.asarray(low + (high - low) * (ranks - lower))
