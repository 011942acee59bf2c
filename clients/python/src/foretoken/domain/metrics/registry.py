"""All metrics, by name and in the order of tables."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foretoken.domain.metrics.metric import Figure, Metric, Place, figures_of
from foretoken.domain.metrics.pool import POOLS
from foretoken.domain.metrics.request import LATENCIES
from foretoken.domain.metrics.search import SEARCH
from foretoken.domain.metrics.serving import SERVING
from foretoken.domain.metrics.training import RUN, STEP_RATES, STEP_USE

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (*SEARCH, *RUN, *LATENCIES, *STEP_RATES, *SERVING, *POOLS, *STEP_USE)
}

# What a target is about other than latencies: the share of requests in their SLOs.
ATTAINMENT = "slo"


def shown_at(place: Place, record: Any) -> list[Metric]:
    """Return the metrics of a report, or of a row of a table, that are shown somewhere."""
    return [metric for metric in METRICS.values() if place in metric.shown and metric.is_of(record)]


def list_figures(
    place: Place, records: Sequence[Any], *, prefix: str = "", without: Collection[str] = ()
) -> list[Figure]:
    """Return the figures of records of one kind that are shown somewhere, a row each.

    A record that is None, such as that of what cannot run, has none. Labels begin with `prefix`;
    metrics named in `without` are left out.
    """
    first = next((record for record in records if record is not None), None)
    return [
        figure
        for metric in shown_at(place, first)
        if metric.name not in without
        for figure in figures_of(metric, records, prefix)
    ]


def describe_limit(metric: str, percentile: float) -> str:
    """Return what a limit is about: `TTFT p99`, `TPOT mean`, `SLO attainment`."""
    if metric == ATTAINMENT:
        return METRICS["slo_attainment_ratio"].label
    return f"{METRICS[metric].label} {describe_statistic(percentile)}"


def describe_statistic(percentile: float) -> str:
    """Return the name of a percentile, of the mean where it is 0: `p99`."""
    return f"p{percentile:g}" if percentile else "mean"
