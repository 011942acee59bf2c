"""Every alert fires when it should, and none does where all is well: Prometheus itself judges."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

_POD = 'namespace="foretoken", pod="a-0", job="foretoken/foretoken"'
# Values as promtool has them: a start and a step, so many times (N), by minute.
_STEPS = 240
# What looks further back has values by the hour.
_HOURS: Mapping[str, int] = {"ForetokenBackupOld": 40, "ForetokenPredictorSnapshotStale": 740}
_NOTHING, _CONSTANT = "0xN", "1xN"


def _series(name: str, values: str, **labels: str) -> Mapping[str, str]:
    further = "".join(f', {key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{_POD}{further}}}", "values": values}


def _p99(service: str, method: str, slow: str) -> list[Mapping[str, str]]:
    """Return calls of which all are slower than a bound."""
    name = f"foretoken_{service}_request_seconds_bucket"
    return [
        _series(name, _NOTHING, method=method, le=slow),
        _series(name, "0+60xN", method=method, le="10"),
        _series(name, "0+60xN", method=method, le="+Inf"),
    ]


_FIRING: Mapping[str, list[Mapping[str, str]]] = {
    "ForetokenTargetDown": [_series("up", _NOTHING)],
    "ForetokenFilesRunOut": [
        _series("process_open_fds", "900xN"),
        _series("process_max_fds", "1000xN"),
    ],
    "ForetokenErrors": [
        _series("foretoken_simulator_requests_total", "0+90xN", method="GetJob", code="OK"),
        _series("foretoken_simulator_requests_total", "0+10xN", method="GetJob", code="INTERNAL"),
    ],
    "ForetokenSlowCalls": _p99("profiler", "GetJob", "0.25"),
    "ForetokenSlowPredictions": _p99("predictor", "Predict", "0.025"),
    "ForetokenCallsRefused": [
        _series("foretoken_catalog_refused_requests_total", "0+60xN", method="Record")
    ],
    "ForetokenCallsWaiting": [
        _series("foretoken_catalog_requests_waiting", "60xN", method="ListRuns"),
        _series("foretoken_catalog_requests_waiting_limit", "64xN", method="ListRuns"),
    ],
    "ForetokenUndecodableMessages": [
        _series("foretoken_catalog_undecodable_messages_total", "0+1xN", method="Record")
    ],
    "ForetokenJobsFail": [
        _series("foretoken_simulator_jobs", "0+1xN", kind="serving", state="failed")
    ],
    "ForetokenQueueFull": [
        _series("foretoken_predictor_queue_length", "62xN"),
        _series("foretoken_predictor_queue_limit", "64xN"),
    ],
    "ForetokenStorageFull": [
        _series("foretoken_catalog_rejects_total", "0+1xN", reason="STORAGE_FULL")
    ],
    "ForetokenStorageFills": [
        # From 100 GB down to nothing within two days; the catalog takes little.
        _series("foretoken_catalog_disk_free_bytes", "100000000000-40000000xN"),
        _series("foretoken_catalog_storage_bytes", "1000xN"),
    ],
    "ForetokenCatalogBusy": [
        _series("foretoken_catalog_rejects_total", "0+1xN", reason="CATALOG_BUSY")
    ],
    "ForetokenBackupOld": [
        _series("foretoken_catalog_backup_timestamp_seconds", "60xN"),
        _series("process_start_time_seconds", "1xN"),
    ],
    "ForetokenPredictorDrift": [
        _series("foretoken_predictor_drift_error_ratio", "0.3xN", operator="gemm", device="a30"),
        _series("foretoken_predictor_drift_rows", "40xN", operator="gemm", device="a30"),
    ],
    "ForetokenPredictorNoModel": [_series("foretoken_predictor_models_active", _NOTHING)],
    "ForetokenPredictorModelsDiffer": [
        _series("foretoken_predictor_model_info", _CONSTANT, version="a"),
        _series("foretoken_predictor_model_info", _CONSTANT, version="b"),
    ],
    "ForetokenPredictorModelsUnread": [
        _series("foretoken_predictor_model_load_failures_total", "0+1xN")
    ],
    "ForetokenPredictorSnapshotStale": [
        # promtool's clock begins in 1970.
        _series("foretoken_predictor_model_snapshot_timestamp_seconds", "1xN"),
        _series("foretoken_predictor_drift_left_out_rows", "5xN"),
    ],
    "ForetokenWorkersDie": [_series("foretoken_simulator_worker_restarts_total", "0+1xN")],
}
_WELL = [
    _series("up", _CONSTANT),
    _series("process_open_fds", "100xN"),
    _series("process_max_fds", "1000xN"),
    _series("process_start_time_seconds", "1xN"),
    _series("foretoken_simulator_requests_total", "0+99990xN", method="GetJob", code="OK"),
    _series("foretoken_simulator_requests_total", "0+10xN", method="GetJob", code="INTERNAL"),
    # What callers do wrong is no fault of the service.
    _series("foretoken_simulator_requests_total", "0+9000xN", method="GetJob", code="NOT_FOUND"),
    _series("foretoken_catalog_requests_waiting", "10xN", method="ListRuns"),
    _series("foretoken_catalog_requests_waiting_limit", "64xN", method="ListRuns"),
    # One that takes no queue is never full of it.
    _series("foretoken_catalog_requests_waiting", _NOTHING, method="Record"),
    _series("foretoken_catalog_requests_waiting_limit", _NOTHING, method="Record"),
    _series("foretoken_catalog_rejects_total", "0+1xN", reason="INVALID_REQUEST"),
    _series("foretoken_catalog_disk_free_bytes", "100000000000-1000xN"),
    _series("foretoken_catalog_storage_bytes", "1000000000xN"),
    # None yet: the catalog is new.
    _series("foretoken_catalog_backup_timestamp_seconds", _NOTHING),
    _series("foretoken_predictor_drift_error_ratio", "0.3xN", operator="gemm", device="a30"),
    _series("foretoken_predictor_drift_rows", "5xN", operator="gemm", device="a30"),
    _series("foretoken_predictor_drift_left_out_rows", _NOTHING),
    _series("foretoken_predictor_models_active", _CONSTANT),
    _series("foretoken_predictor_model_info", _CONSTANT, version="a"),
    _series("foretoken_simulator_jobs", "7xN", kind="serving", state="failed"),
    _series("foretoken_simulator_queue_length", "6xN"),
    _series("foretoken_simulator_queue_limit", "64xN"),
]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, of Prometheus, is not on this machine")
    return found


def _judge(
    promtool: str,
    folder: Path,
    rules: Sequence[Mapping[str, Any]],
    series: Sequence[Mapping[str, str]],
    hours: int = 0,
) -> list[str]:
    """Return the names of the alerts that fire in the end."""
    unit, steps = ("h", hours) if hours else ("m", _STEPS)
    filled = [{**one, "values": one["values"].replace("N", str(steps))} for one in series]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    test = {
        "interval": f"1{unit}",
        "input_series": filled,
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{steps}{unit}",
                # What is there instead is in promtool's answer.
                "exp_samples": [{"labels": '{alertname="none"}', "value": 1}],
            }
        ],
    }
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": f"1{unit}", "tests": [test]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(content))
    command = [promtool, "test", "rules", str(folder / "tests.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    _, got, found = (done.stdout + done.stderr).partition("got:")
    assert got, done.stdout + done.stderr
    return re.findall(r'alertname="(\w+)"', found)


@pytest.fixture(scope="module")
def rules(repository: Path) -> list[Mapping[str, Any]]:
    manifest = repository / "deploy" / "k8s" / "components" / "alerts" / "alerts.yaml"
    spec = yaml.safe_load(manifest.read_text(encoding="utf-8"))["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def test_each_has_a_case(rules: list[Mapping[str, Any]]) -> None:
    assert {rule["alert"] for rule in rules} == set(_FIRING)


@pytest.mark.parametrize("name", _FIRING)
def test_an_alert_fires(
    rules: list[Mapping[str, Any]], promtool: str, tmp_path: Path, name: str
) -> None:
    of_name = [rule for rule in rules if rule["alert"] == name]
    fired = _judge(promtool, tmp_path, of_name, _FIRING[name], _HOURS.get(name, 0))
    assert [name] == fired


def test_none_fires_where_all_is_well(
    rules: list[Mapping[str, Any]], promtool: str, tmp_path: Path
) -> None:
    assert [] == _judge(promtool, tmp_path, rules, _WELL)
