# ruff: noqa: INP001 - a program, not a part of the package
"""Makes a Grafana dashboard of every service: `python deploy/monitoring/dashboards.py FOLDER`.

Panels follow from the table of metrics: of a counter its rate, of a gauge its value, of a histogram
quantiles. A test holds the committed files to it; `make monitoring` writes them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foretoken.app.telemetry.metric_table import (
    CALLS,
    COUNTER,
    HISTOGRAM,
    OBSERVED,
    ServiceMetric,
    metrics_of,
)

Panel = dict[str, Any]

# Of Grafana 11, which 10 and 12 read as well.
_SCHEMA_VERSION = 39
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8
_SELECTED = 'namespace=~"$namespace",pod=~"$pod"'
_QUANTILES = (0.5, 0.99)
# What prometheus_client says of every process: name, meaning, query, unit.
_PROCESS = (
    ("Processor", "Cores in use", "rate(process_cpu_seconds_total{%s}[$__rate_interval])", "short"),
    ("Memory", "Resident memory", "process_resident_memory_bytes{%s}", "bytes"),
    ("Open files", "Share of the files it may open", "process_open_fds{%s} / process_max_fds{%s}",
     "percentunit"),
)  # fmt: skip


def build_dashboard(service: str) -> dict[str, Any]:
    """Return the dashboard of a service as Grafana reads it."""
    calls = [one for one in metrics_of(service) if one in CALLS]
    own = [one for one in metrics_of(service) if one not in CALLS]
    rows: list[tuple[str, list[Panel]]] = [("Calls", [_panel(service, one) for one in calls])]
    if own:
        rows.append((service.capitalize(), [_panel(service, one) for one in own]))
    rows.append(("Process", [_process(*one, service) for one in _PROCESS]))
    return {
        "uid": f"foretoken-{service}",
        "title": f"Foretoken: {service}",
        "tags": ["foretoken"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables(service))},
        "panels": list(_place(rows)),
    }


def _variables(service: str) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    seen = f"foretoken_{service}_requests_in_flight"
    for name, within in (("namespace", ""), ("pod", '{namespace=~"$namespace"}')):
        yield {
            "name": name,
            "type": "query",
            "label": name.capitalize(),
            "datasource": _source(),
            "query": {"query": f"label_values({seen}{within}, {name})", "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panel(service: str, metric: ServiceMetric) -> Panel:
    series = f"{metric.series(service)}{{{_SELECTED}}}"
    labels = ", ".join(metric.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{pod}}"
    unit = metric.unit or "short"
    if metric.kind == HISTOGRAM:
        by = f"sum by ({', '.join((*metric.labels, 'le'))})"
        rates = f"{by} (rate({series}[$__rate_interval]))"
        queries = [
            (f"histogram_quantile({q}, {rates})", f"p{q * 100:g} {legend}") for q in _QUANTILES
        ]
    elif metric.kind == COUNTER:
        unit = {"bytes": "Bps", "s": "percentunit"}.get(metric.unit, "cps")
        queries = [(f"sum by ({labels or 'pod'}) (rate({series}[$__rate_interval]))", legend)]
    elif metric.unit == "dateTimeFromNow":
        # Grafana counts ms.
        queries = [(f"max by (pod) ({series}) * 1000 > 0", "{{pod}}")]
    else:
        queries = [(f"sum by ({', '.join((*metric.labels, 'pod'))}) ({series})", legend)]
    return _timeseries(metric.name.replace("_", " "), metric.meaning, unit, queries)


def _process(title: str, meaning: str, query: str, unit: str, service: str) -> Panel:
    # Of those pods that serve this service.
    found = query.replace("%s", _SELECTED)
    seen = f"max by (namespace, pod) (foretoken_{service}_requests_in_flight{{{_SELECTED}}})"
    text = f"({found}) and on (namespace, pod) {seen}"
    return _timeseries(title, meaning, unit, [(text, "{{pod}}")])


def _timeseries(title: str, meaning: str, unit: str, queries: Sequence[tuple[str, str]]) -> Panel:
    return {
        "type": "timeseries",
        "title": title,
        "description": meaning,
        "datasource": _source(),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _source(), "expr": query,
             "legendFormat": legend}
            for number, (query, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def _place(rows: Sequence[tuple[str, list[Panel]]]) -> Iterator[Panel]:
    """Yield rows and their panels, three abreast, each with its number."""
    y = number = 0
    for title, panels in rows:
        number += 1
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        yield {"type": "row", "title": title, "id": number, "collapsed": False, "panels": [],
               "gridPos": place}  # fmt: skip
        y += 1
        abreast = _COLUMNS // _WIDTH
        for index, panel in enumerate(panels):
            number += 1
            x, down = index % abreast * _WIDTH, index // abreast * _HEIGHT
            place = {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y + down}
            yield {**panel, "id": number, "gridPos": place}
        y += -(-len(panels) // abreast) * _HEIGHT


def write_dashboards(folder: Path) -> None:
    """Write the dashboards of all services, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for service in OBSERVED:
        text = json.dumps(build_dashboard(service), indent=1)
        (folder / f"{service}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write_dashboards(Path(sys.argv[1]))
