# ruff: noqa: INP001 - a program, not a part of the package
"""Makes the alerts of all services: `python deploy/monitoring/alerts.py FILE`.

Each has a page in docs/runbooks of its name. A test holds the committed file, the pages and the
metrics they look at together; `make monitoring` writes the file.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from foretoken.app.config import SERVICES

WARNING: Final = "warning"
CRITICAL: Final = "critical"
# Objectives; docs/reference/service-levels.md says what they promise.
AVAILABILITY: Final = 0.999
PREDICT_S: Final = 0.025
STATE_S: Final = 0.25
# Codes that are the service's fault; the others are the caller's.
FAULTS: Final = "UNKNOWN|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|DATA_LOSS"
# Budget burnt, over a long window and a short one that says it still burns: 2 % of 30 days in an
# hour, 5 % in six. Source: Google's SRE workbook, "Alerting on SLOs", multiwindow burn rates.
_BURNS = ((14.4, "1h", "5m", CRITICAL), (6.0, "6h", "30m", WARNING))
_BACKUP_H = 36
_STALE_DAYS = 30
_QUEUED = ("predictor", "simulator", "profiler")


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A condition in PromQL that holds `for` so long, and what to tell."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    labels: dict[str, str] = field(default_factory=dict)

    def rule(self) -> dict[str, Any]:
        """Return it as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {"summary": self.summary, "runbook": f"docs/runbooks/{self.name}.md"},
        }


def _of_every_service(service: str) -> Iterator[Alert]:
    prefix, labels = f"foretoken_{service}", {"service": service}
    for burn, long, short, severity in _BURNS:
        limit = round(burn * (1 - AVAILABILITY), 6)
        ratios = [
            f'(sum by (namespace) (rate({prefix}_requests_total{{code=~"{FAULTS}"}}[{window}]))'
            f" / sum by (namespace) (rate({prefix}_requests_total[{window}]))) > {limit}"
            for window in (long, short)
        ]
        yield Alert(
            name="ForetokenErrors",
            expr=" and ".join(ratios),
            lasts="2m" if severity == CRITICAL else "15m",
            severity=severity,
            summary=f"{{{{ $value | humanizePercentage }}}} of the {service}'s calls fail",
            labels=labels,
        )
    yield Alert(
        name="ForetokenSlowCalls",
        expr=_p99(prefix, "GetJob", "10m", STATE_S),
        lasts="10m",
        severity=WARNING,
        summary=f"The {service} takes {{{{ $value | humanizeDuration }}}} to say how a job is",
        labels=labels,
    )
    yield Alert(
        name="ForetokenCallsRefused",
        expr=f"sum by (namespace, method) (rate({prefix}_refused_requests_total[10m])) > 0.1",
        lasts="10m",
        severity=WARNING,
        summary=f"The {service} refuses {{{{ $labels.method }}}}: too many at once",
        labels=labels,
    )
    yield Alert(
        name="ForetokenCallsWaiting",
        expr=(
            f"max by (namespace, method) ({prefix}_requests_waiting"
            f" / ({prefix}_requests_waiting_limit > 0)) > 0.8"
        ),
        lasts="10m",
        severity=WARNING,
        summary=f"Calls of {{{{ $labels.method }}}} wait for threads of the {service}",
        labels=labels,
    )
    yield Alert(
        name="ForetokenUndecodableMessages",
        expr=f"sum by (namespace, method) (rate({prefix}_undecodable_messages_total[1h])) > 0",
        lasts="15m",
        severity=WARNING,
        summary=f"Somebody sends the {service} what is no message of {{{{ $labels.method }}}}",
        labels=labels,
    )
    yield Alert(
        name="ForetokenJobsFail",
        expr=(f'sum by (namespace, kind) (delta({prefix}_jobs{{state="failed"}}[1h])) > 3'),
        lasts="5m",
        severity=WARNING,
        summary=f"Jobs of kind {{{{ $labels.kind }}}} fail in the {service}",
        labels=labels,
    )
    if service in _QUEUED:
        yield Alert(
            name="ForetokenQueueFull",
            expr=f"max by (namespace, pod) ({prefix}_queue_length / {prefix}_queue_limit) > 0.9",
            lasts="10m",
            severity=WARNING,
            summary=f"The queue of jobs of the {service} is nearly full in {{{{ $labels.pod }}}}",
            labels=labels,
        )


def _p99(prefix: str, method: str, window: str, limit_s: float) -> str:
    buckets = f'{prefix}_request_seconds_bucket{{method="{method}"}}'
    rates = f"sum by (namespace, le) (rate({buckets}[{window}]))"
    return f"histogram_quantile(0.99, {rates}) > {limit_s}"


# A table: every alert in as few lines as it needs.
# fmt: off
PROCESS = (
    Alert(name="ForetokenTargetDown", expr='up{job=~".*foretoken.*"} == 0', lasts="5m",
        severity=CRITICAL, summary="Prometheus cannot read {{ $labels.pod }}"),
    Alert(name="ForetokenFilesRunOut",
        expr=('process_open_fds{job=~".*foretoken.*"} / process_max_fds{job=~".*foretoken.*"}'
            " > 0.8"),
        lasts="15m", severity=WARNING,
        summary="{{ $labels.pod }} has {{ $value | humanizePercentage }} of its files open"),
)
CATALOG = (
    Alert(name="ForetokenStorageFull",
        expr=('sum by (namespace) (increase('
            'foretoken_catalog_rejects_total{reason="STORAGE_FULL"}[10m])) > 0'),
        lasts="0m", severity=CRITICAL,
        summary="The catalog refuses measurements: its disk is full"),
    Alert(name="ForetokenStorageFills",
        expr=("foretoken_catalog_disk_free_bytes < foretoken_catalog_storage_bytes"
            " or predict_linear(foretoken_catalog_disk_free_bytes[6h], 2 * 86400) < 0"),
        lasts="30m", severity=WARNING,
        summary="The catalog's disk has no room for a backup, or fills within two days"),
    Alert(name="ForetokenCatalogBusy",
        expr=('sum by (namespace) (increase('
            'foretoken_catalog_rejects_total{reason="CATALOG_BUSY"}[15m])) > 0'),
        lasts="15m", severity=WARNING, summary="The catalog's database keeps refusing batches"),
    Alert(name="ForetokenBackupOld",
        # A new catalog has that long for its first one.
        expr=(f"(time() - (foretoken_catalog_backup_timestamp_seconds > 0)) > {_BACKUP_H} * 3600"
            " or (foretoken_catalog_backup_timestamp_seconds == 0 and on (namespace, pod)"
            f" (time() - process_start_time_seconds) > {_BACKUP_H} * 3600)"),
        lasts="1h", severity=WARNING,
        summary="The catalog has no backup that is younger than a day and a half"),
)
PREDICTOR = (
    Alert(name="ForetokenSlowPredictions", expr=_p99("foretoken_predictor", "Predict", "10m",
        PREDICT_S), lasts="15m", severity=WARNING,
        summary="One of a hundred predictions takes {{ $value | humanizeDuration }} or more"),
    # A median over fewer rows than these moves too much by chance.
    Alert(name="ForetokenPredictorDrift",
        expr=("max by (namespace, operator, device) (foretoken_predictor_drift_error_ratio > 0.2"
            " and foretoken_predictor_drift_rows >= 30)"),
        lasts="1h", severity=WARNING,
        summary=("Half of the new {{ $labels.operator }} measurements on {{ $labels.device }} are"
            " further than {{ $value | humanizePercentage }} from their estimates")),
    Alert(name="ForetokenPredictorNoModel", expr="foretoken_predictor_models_active == 0",
        lasts="15m", severity=WARNING,
        summary="{{ $labels.pod }} answers from rooflines alone: no trained model is active"),
    Alert(name="ForetokenPredictorModelsDiffer",
        expr=("count by (namespace) (count by (namespace, version)"
            " (foretoken_predictor_model_info)) > 1"),
        lasts="15m", severity=WARNING,
        summary="Predictors answer with different model versions"),
    Alert(name="ForetokenPredictorModelsUnread",
        expr="increase(foretoken_predictor_model_load_failures_total[30m]) > 0",
        lasts="30m", severity=WARNING,
        summary="{{ $labels.pod }} cannot load a model version"),
    Alert(name="ForetokenPredictorSnapshotStale",
        expr=("(time() - (foretoken_predictor_model_snapshot_timestamp_seconds > 0)"
            f" > {_STALE_DAYS} * 86400) and on (namespace, pod)"
            " (foretoken_predictor_drift_left_out_rows > 0"
            " or sum by (namespace, pod) (foretoken_predictor_drift_rows) > 0)"),
        lasts="1h", severity=WARNING,
        summary=("The model's measurements are {{ $value | humanizeDuration }} old, and newer ones"
            " are there")),
)
SIMULATOR = (
    Alert(name="ForetokenWorkersDie",
        expr="increase(foretoken_simulator_worker_restarts_total[30m]) > 2",
        lasts="5m", severity=WARNING,
        summary="Workers of searches die in {{ $labels.pod }}"),
)
# fmt: on


def all_alerts() -> dict[str, tuple[Alert, ...]]:
    """Return all alerts by what they watch."""
    own = {"catalog": CATALOG, "predictor": PREDICTOR, "simulator": SIMULATOR}
    groups = {service: (*_of_every_service(service), *own.get(service, ())) for service in SERVICES}
    return {"process": PROCESS, **groups}


def build_rules() -> dict[str, Any]:
    """Return the alerts as the Prometheus operator reads them; `spec` is what Prometheus reads."""
    groups = [
        {"name": f"foretoken-{name}", "rules": [alert.rule() for alert in alerts]}
        for name, alerts in all_alerts().items()
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "foretoken", "labels": {"app.kubernetes.io/part-of": "foretoken"}},
        "spec": {"groups": groups},
    }


def write_rules(path: Path) -> None:
    """Write the alerts as a manifest."""
    head = "# Made by `make monitoring`. What to do about each: docs/runbooks.\n"
    text = yaml.safe_dump(build_rules(), sort_keys=False, width=120)
    path.write_text(f"{head}{text}", encoding="utf-8")


if __name__ == "__main__":
    write_rules(Path(sys.argv[1]))
