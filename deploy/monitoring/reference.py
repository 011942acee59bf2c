# ruff: noqa: INP001, E501 - a program, not a part of the package; lines of the page
"""Makes the page of all metrics and alerts: `python deploy/monitoring/reference.py FILE`.

A test holds the committed page to it; `make monitoring` writes it.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from alerts import all_alerts

from foretoken.app.telemetry.metric_table import (
    CALLS,
    JOBS,
    OBSERVED,
    WEB,
    ServiceMetric,
    metrics_of,
)

_INTRO = """\
# What a process serves to Prometheus

Made by `make monitoring` from the table `foretoken.app.telemetry.metric_table`, like the Grafana dashboards in
`deploy/k8s/components/dashboards` and the alerts in `deploy/k8s/components/alerts`. Counters and histograms count since the process
started. Names begin with `foretoken_SERVICE_`; counters end with `_total`. `server.metrics_port` says where they are read. What
`prometheus_client` says of any process is there as well (`process_resident_memory_bytes`, `process_open_fds`, ...).
"""
_EVERY = """
## Of every service

Calls by method, over gRPC; of a method that streams, those in flight are its open streams. Requests over HTTP have these of their own,
as `foretoken_web_*` by route, without the last two. Jobs are those a process keeps.
"""
_ALERTS = """
## Alerts

Each name leads to what to do. `service` is a label of those that every service has.
"""


def build_page() -> str:
    """Return the page as Markdown."""
    lines = [_INTRO, _EVERY.lstrip("\n"), *_table((*CALLS, *JOBS))]
    for service in OBSERVED:
        own = tuple(one for one in metrics_of(service) if one not in (*CALLS, *JOBS))
        if own and service != WEB:
            lines += ["", f"## {service.capitalize()}", "", *_table(own)]
    return "\n".join([*lines, _ALERTS, *_alert_table(), ""])


def _table(metrics: Sequence[ServiceMetric]) -> Iterator[str]:
    yield "| metric | kind | labels | is |"
    yield "|---|---|---|---|"
    for one in metrics:
        ending = "_total" if one.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in one.labels)
        meaning = one.meaning.replace("|", "\\|")
        yield f"| `{one.name}{ending}` | {one.kind} | {labels} | {meaning} |"


def _alert_table() -> Iterator[str]:
    yield "| alert | of | severity | lasts |"
    yield "|---|---|---|---|"
    found: dict[tuple[str, str, str], list[str]] = {}
    for group, alerts in all_alerts().items():
        for one in alerts:
            found.setdefault((one.name, one.severity, one.lasts), []).append(group)
    for (name, severity, lasts), groups in found.items():
        link = f"[{name}](../runbooks/{name}.md)"
        yield f"| {link} | {', '.join(groups)} | {severity} | {lasts} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(build_page(), encoding="utf-8")
