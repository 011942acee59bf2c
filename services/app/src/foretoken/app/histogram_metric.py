"""Histograms that a service counts itself, as Prometheus has them."""

import itertools
from typing import Protocol

from prometheus_client.core import HistogramMetricFamily


class CountedHistogram(Protocol):
    """Counts of each bucket by itself, the last of them above the last bound, and the sum."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of buckets."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Values in each."""

    @property
    def total(self) -> float:
        """The sum of all values."""


def add_histogram(
    family: HistogramMetricFamily, labels: tuple[str, ...], histogram: CountedHistogram
) -> None:
    """Add the counts of one set of labels to a family."""
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets, histogram.total)
