"""Every metric that a process serves to Prometheus, once: its name, kind, labels and meaning.

What collects them, the reference page and the dashboards follow from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from foretoken.app.config import SERVICES

Kind = Literal["counter", "gauge", "histogram"]
COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"
# A service of its own: requests over HTTP, whatever they ask of.
WEB: Final = "web"


@dataclass(frozen=True, slots=True)
class ServiceMetric:
    """One metric of a service; its name lacks `foretoken_SERVICE_`, and endings such as `_total`.

    `unit` is what Grafana calls it: `s`, `bytes`, `percentunit`, `dateTimeFromNow`, or nothing.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    def full_name(self, service: str) -> str:
        """Return the name of its family."""
        return f"foretoken_{service}_{self.name}"

    def series(self, service: str) -> str:
        """Return the name that queries have: of a histogram, that of its buckets."""
        return self.full_name(service) + {COUNTER: "_total", HISTOGRAM: "_bucket"}.get(
            self.kind, ""
        )


# Tables: every metric in as few lines as it needs.
# fmt: off
CALLS = (
    ServiceMetric("requests", COUNTER, "Calls ended, by status", ("method", "code")),
    ServiceMetric("request_seconds", HISTOGRAM, "Time to the end of a call", ("method",), "s"),
    ServiceMetric("requests_in_flight", GAUGE, "Calls now running", ("method",)),
    ServiceMetric("requests_limit", GAUGE, "Calls of a method that may run at once", ("method",)),
    ServiceMetric("requests_waiting", GAUGE, "Calls that wait for others to end", ("method",)),
    ServiceMetric("requests_waiting_limit", GAUGE, "Calls of a method that may wait", ("method",)),
    ServiceMetric("refused_requests", COUNTER,
        "Calls refused because there were too many of their method", ("method",)),
    ServiceMetric("undecodable_messages", COUNTER, "Messages whose bytes could not be decoded",
        ("method",)),
)
JOBS = (
    ServiceMetric("jobs", GAUGE, "Jobs that are kept", ("kind", "state")),
    ServiceMetric("queue_length", GAUGE, "Jobs that wait"),
    ServiceMetric("queue_limit", GAUGE, "Jobs that may wait"),
)
CATALOG = (
    ServiceMetric("rows", COUNTER, "New rows on disk"),
    ServiceMetric("ingest_bytes", COUNTER, "Arrow data of new rows", (), "bytes"),
    ServiceMetric("batches", COUNTER, "New batches on disk"),
    ServiceMetric("duplicate_batches", COUNTER, "Batches that were there already"),
    ServiceMetric("ingest_seconds", COUNTER, "Time from arrival to receipt", (), "s"),
    ServiceMetric("rejects", COUNTER, "Batches that were refused", ("reason",)),
    ServiceMetric("sql_queries", COUNTER, "SQL queries asked"),
    ServiceMetric("sql_queries_running", GAUGE, "SQL queries under way"),
    ServiceMetric("sql_limits", COUNTER, "SQL queries that a limit ended", ("limit",)),
    ServiceMetric("users", GAUGE, "Reads and writes under way"),
    ServiceMetric("storage_bytes", GAUGE, "Size of the catalog", (), "bytes"),
    ServiceMetric("disk_free_bytes", GAUGE, "Room on the volume with the catalog's files", (),
        "bytes"),
    ServiceMetric("disk_bytes", GAUGE, "Size of the volume with the catalog's files", (), "bytes"),
    ServiceMetric("backup_timestamp_seconds", GAUGE,
        "When the last backup was read to its end; 0: never", (), "dateTimeFromNow"),
)
PREDICTOR = (
    ServiceMetric("estimates", COUNTER, "Rows answered", ("operator", "provenance")),
    ServiceMetric("interval_ratio", HISTOGRAM, "Upper over lower bound of an estimate",
        ("operator", "provenance")),
    ServiceMetric("nearest_octaves", HISTOGRAM, "Distance to the nearest measured point",
        ("operator", "provenance")),
    ServiceMetric("predict_seconds", HISTOGRAM, "Time to answer a table of calls", ("operator",),
        "s"),
    ServiceMetric("refusals", COUNTER, "Tables refused as out of coverage", ("operator",)),
    ServiceMetric("cache_hits", COUNTER, "Tables answered from memory"),
    ServiceMetric("cache_misses", COUNTER, "Tables that had to be computed"),
    ServiceMetric("model_loads", COUNTER, "Models that began to answer"),
    ServiceMetric("model_load_failures", COUNTER, "Models that could not be loaded"),
    ServiceMetric("models_active", GAUGE, "1 while a trained model answers, else 0"),
    ServiceMetric("model_info", GAUGE, "1 for the version that answers", ("version",)),
    ServiceMetric("model_snapshot_timestamp_seconds", GAUGE,
        "From when the measurements are that the active model was trained on; 0: no model", (),
        "dateTimeFromNow"),
    ServiceMetric("drift_rows", GAUGE, "Measurements since the training that were compared",
        ("operator", "device")),
    ServiceMetric("drift_error_ratio", GAUGE, "Median of |measured / estimated - 1|",
        ("operator", "device"), "percentunit"),
    ServiceMetric("drift_error_ratio_p90", GAUGE, "90th percentile of |measured / estimated - 1|",
        ("operator", "device"), "percentunit"),
    ServiceMetric("drift_bias_ratio", GAUGE, "Median of measured / estimated - 1",
        ("operator", "device"), "percentunit"),
    ServiceMetric("drift_inside_ratio", GAUGE, "Share of measurements inside the 90 % intervals",
        ("operator", "device"), "percentunit"),
    ServiceMetric("drift_left_out_rows", GAUGE,
        "Measurements since the training not compared yet"),
    ServiceMetric("drift_flagged_rows", GAUGE, "Measurements in new runs that are flagged"),
)
SIMULATOR = (
    ServiceMetric("searches_running", GAUGE, "Searches under way"),
    ServiceMetric("points_evaluated", COUNTER, "Points answered in closed form"),
    ServiceMetric("points_simulated", COUNTER, "Tasks of searches that workers simulated"),
    ServiceMetric("journal_hits", COUNTER, "Results of searches not computed again"),
    ServiceMetric("simulation_seconds", HISTOGRAM, "Time of a simulation", ("within",), "s"),
    ServiceMetric("workers", GAUGE, "Workers of searches that are there"),
    ServiceMetric("worker_restarts", COUNTER, "Workers that were started for one that died"),
)
# fmt: on
_OWN: Mapping[str, tuple[ServiceMetric, ...]] = {
    "catalog": (*JOBS, *CATALOG),
    "predictor": (*JOBS, *PREDICTOR),
    "simulator": (*JOBS, *SIMULATOR),
    "profiler": JOBS,
}
# Nothing over HTTP is bytes of another kind, and what is refused there has a code.
_WEB = tuple(one for one in CALLS if one.name not in {"undecodable_messages", "refused_requests"})


def metrics_of(service: str) -> tuple[ServiceMetric, ...]:
    """Return the metrics of a service, or of what is asked over HTTP (`web`)."""
    return _WEB if service == WEB else (*CALLS, *_OWN[service])


def find_metric(service: str, name: str) -> ServiceMetric:
    """Return a metric of a service by its name without the prefix."""
    return next(one for one in metrics_of(service) if one.name == name)


OBSERVED: Final = (*SERVICES, WEB)
