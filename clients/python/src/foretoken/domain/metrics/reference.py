"""The reference page of all metrics, docs/reference/metrics.md: `python -m` this module prints it.

A test holds the page to it; `make metrics-reference` writes it.
"""

import sys
from collections.abc import Iterator, Sequence

from foretoken.domain.metrics.metric import SHARE, Metric
from foretoken.domain.metrics.registry import POOLS, SEARCH
from foretoken.domain.metrics.request import LATENCIES
from foretoken.domain.metrics.serving import SERVING
from foretoken.domain.metrics.training import RUN, STEP_RATES, STEP_USE

_INTRO = """\
# Metrics

Every metric once: its field in reports, JSON and tables, its label, its unit, which way is
better, and its definition. `foretoken.domain.metrics` has them; terminals, pages and comparisons
write them from there, and this page is made from it. A share is a ratio from 0 to 1, written in
per cent. Names with dots are fields of fields. [Serving metrics](serving-metrics.md) has the
instants, tables and histograms, [training reports](training-report.md) and
[training runs](training-runs.md) the parts of steps and runs.
"""
_SECTIONS: Sequence[tuple[str, str, Sequence[Metric]]] = (
    (
        "Latencies of requests",
        "Summaries with `mean` and percentiles (linear between ranks), of completed requests.",
        LATENCIES,
    ),
    ("Serving", "Of a run of a deployment, and of its replicas, stages and classes.", SERVING),
    ("Pools", "Of a pool of a cluster, over the time that its GPUs were held.", POOLS),
    ("Training step", "Of one optimizer step.", (*STEP_RATES, *STEP_USE)),
    ("Training run", "Of all steps, with failures, checkpoints and prices.", RUN),
    ("Capacities and searches", "Of the rate that meets targets, and of a space's points.", SEARCH),
)


def reference_page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_INTRO, *(_section(*section) for section in _SECTIONS)])


def _section(title: str, intro: str, metrics: Sequence[Metric]) -> str:
    return "\n".join([f"## {title}", "", intro, "", *_table(metrics), ""])


def _table(metrics: Sequence[Metric]) -> Iterator[str]:
    yield "| field | label | unit | better | definition |"
    yield "|---|---|---|---|---|"
    for metric in metrics:
        label = metric.label.format("*part*")
        unit = "0 to 1" if metric.unit == SHARE else metric.unit
        yield f"| `{metric.name}` | {label} | {unit} | {metric.better} | {metric.definition} |"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
