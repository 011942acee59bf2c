"""Answer: the ranked deployments of a search, as figures, a picture and a table that is live."""

import json
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final

from foretoken.app.cli.search_serving import find_launched
from foretoken.app.installed_runs import describe_nearest, list_installed_runs
from foretoken.app.web.views.results import pack_files
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit, send_json
from foretoken.client.results import read_result
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.job import Job, JobState, error_of_job
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.simulated_answer import read_finalist
from foretoken.simulator.launch.deployment import write_deployment
from foretoken.simulator.report.search_candidates import describe_deployment, describe_verdict

# Columns the page ranks by and shows; the others stay in the table that can be exported.
_COLUMNS: Final = (
    "name",
    "device",
    "mode",
    "profile",
    "quantization",
    "num_devices",
    "replicas",
    "tp",
    "pp",
    "dp",
    "ep",
    "batch_size",
    "ttft_ms",
    "tpot_ms",
    "request_throughput_rps",
    "output_throughput_tps",
    "output_throughput_tps_per_gpu",
    "tps_per_gpu_low",
    "tps_per_gpu_high",
    "tps_per_user",
    "usd_per_million_output_tokens",
    "usd_per_hour",
    "verdict",
    "reason",
    "rank",
)
# How the page's script ranks and shows deployments: see `static/answer.js`.
_SPEC: Final = {
    "columns": [
        ["place", "Rank"],
        ["name", "Deployment"],
        ["device", "GPU"],
        ["num_devices", "GPUs"],
        ["quantization", "Weights"],
        ["batch_size", "Batch"],
        ["ttft_ms", "TTFT (ms)"],
        ["tpot_ms", "TPOT (ms)"],
        ["output_throughput_tps_per_gpu", "Tokens/s per GPU"],
        ["tps_per_gpu_low", "Low", "interval"],
        ["tps_per_gpu_high", "High", "interval"],
        ["tps_per_user", "Tokens/s of a user"],
        ["cost", "USD per million tokens"],
        ["verdict", "Verdict"],
    ],
    # Those that other limits could let in.
    "open": ["ok", "ttft_ms", "tpot_ms", "dominated"],
    "words": ["name", "device", "mode", "quantization", "profile"],
    "limits": [
        {"name": "ttft", "column": "ttft_ms", "unit": "ms"},
        {"name": "tpot", "column": "tpot_ms", "unit": "ms"},
    ],
    "objectives": {
        "throughput_per_gpu": {"column": "output_throughput_tps_per_gpu", "down": True},
        "cost": {"column": "cost"},
        "latency": {"column": "tpot_ms"},
        "num_devices": {"column": "num_devices"},
    },
    "x": {"column": "tps_per_user", "label": "tokens/s of one user"},
    "y": {
        "column": "output_throughput_tps_per_gpu",
        "low": "tps_per_gpu_low",
        "high": "tps_per_gpu_high",
        "label": "tokens/s per GPU",
    },
    "cost": {"column": "usd_per_million_output_tokens", "tokens": 1_000_000},
    "describe": "{name} on {num_devices} {device}, {output_throughput_tps_per_gpu} tokens/s per"
    " GPU, TTFT {ttft_ms} ms, TPOT {tpot_ms} ms",
    "finalists": {
        "rpc": "watch_serving_search",
        "address": "/answers",
        "link": "Show the whole answer, with manifests",
        "cells": [
            {"paths": ["met"], "words": ["missed", "met"]},
            {"paths": ["report.steady.ttft_ms.p50", "report.ttft_ms.p50"]},
            {"paths": ["report.steady.ttft_ms.p99", "report.ttft_ms.p99"]},
            {"paths": ["report.steady.tpot_ms.p50", "report.tpot_ms.p50"]},
            {"paths": ["report.output_throughput_tps_per_gpu"]},
        ],
    },
}
# What the best is in words, beyond the columns that are sent.
_REPLICAS: Final = ("encoders", "prefill_replicas", "prefill_batch_size")
# Digits that are sent of a number: three times what is shown of an estimate.
_DIGITS: Final = 6
# How long a page waits for what takes about a second.
PATIENCE_S: Final = 4.0


def show(visit: Visit) -> Shown | Redirect:
    """Show the answer, or how far it is."""
    job_id = visit.place["job"]
    if (running := show_running(visit, job_id)) is not None:
        return running
    report = read_search(visit, job_id)
    best = _best(report)
    simulation = visit.first("simulation")
    content = {
        "job_id": job_id,
        "spec": write_spec(_SPEC, report.best, report.ties),
        "report": report,
        "best": best,
        "in_words": describe_deployment(best) if best else "",
        "finalists": report.finalists,
        "simulation": simulation,
        "limits": _limits(report),
        "objective": _request(report).get("objective", ""),
        "launched": _launched(report),
        "nearest": _find_nearest(visit, report),
        "rejected": [
            (verdict, describe_verdict(verdict), count)
            for verdict, count in sorted(
                report.num_ruled_out_by_verdict.items(), key=lambda item: -item[1]
            )
        ],
    }
    return Shown(template="answer.html", content=content)


def show_running(visit: Visit, job_id: str) -> Shown | None:
    """Show how far a search is, after a moment; nothing where it has ended well.

    Raises:
        ForetokenError: what it failed with.

    """
    job = wait_a_moment(visit, job_id)
    if job is not None and not job.state.is_final:
        content = {"job": job, "service": "simulator", "title": "Searching", "can_resume": False}
        return Shown(template="job.html", content=content)
    if job is not None and job.state is not JobState.SUCCEEDED:
        raise error_of_job(job)
    return None


def send_candidates(visit: Visit) -> Sent:
    """Send the candidates by column: words as places in a list of them, numbers rounded."""
    candidates = read_search(visit, visit.place["job"]).candidates
    columns = {name: to_column(list(getattr(candidates, name))) for name in _COLUMNS}
    return send_json(columns)


def send_deployment(visit: Visit) -> Sent:
    """Send the files that start a finalist: the one that is named, or the best that meets all."""
    report = read_search(visit, visit.place["job"])
    scenario = _scenario_of(report, visit.first("name"))
    return pack_files(lambda folder: write_deployment(scenario, folder), "deployment.zip")


def simulate(visit: Visit) -> Redirect:
    """Simulate a finalist for itself, with all its requests and steps; go to the job."""
    report = read_search(visit, visit.place["job"])
    scenario = _scenario_of(report, visit.posted.get("name", ""))
    job = visit.simulator.create_serving_simulation(scenario)
    return Redirect(f"/jobs/simulator/{job.job_id}")


def read_search(visit: Visit, job_id: str) -> ServingSearchReport:
    """Return the report of a search: of this service, or as the catalog keeps it.

    Raises:
        UnknownJobError: neither has it.
        InvalidRequestError: it is of another kind.

    """
    try:
        return visit.simulator.get_serving_search_report(job_id)
    except UnknownJobError:
        _, report = read_result(visit.catalog, job_id)
    if not isinstance(report, ServingSearchReport):
        raise InvalidRequestError.of_field("job", f"{job_id} is no search for deployments")
    return report


def wait_a_moment(visit: Visit, job_id: str) -> Job | None:
    """Return the job when it has ended, or as it is after a moment; None where it is forgotten."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        job = visit.simulator.get_job(job_id)
        while not job.state.is_final and time.monotonic() < deadline:
            time.sleep(0.05)
            job = visit.simulator.get_job(job_id)
    except UnknownJobError:
        return None
    return job


def _scenario_of(report: ServingSearchReport, name: str) -> ServingScenario:
    """Return the deployment of the finalist of that name; without one of the best that meets all.

    Raises:
        InvalidRequestError: no finalist is called so, or none meets the targets.

    """
    found = next((finalist for finalist in report.finalists if finalist.name == name), None)
    if name and found is None:
        raise InvalidRequestError.of_field("name", f"{name} was not simulated")
    chosen = found or find_launched(report)
    return read_finalist(report, chosen)


def _launched(report: ServingSearchReport) -> str:
    return next((finalist.name for finalist in report.finalists if finalist.is_met), "")


def _find_nearest(visit: Visit, report: ServingSearchReport) -> str:
    """Return the measured run that is most like the best that was simulated; empty without."""
    if not report.finalists:
        return ""
    return describe_nearest(report, list_installed_runs(visit.catalog, visit.offered.starter))


def _best(report: ServingSearchReport) -> dict[str, Any]:
    """Return the row of the best candidate; empty without one. Absent columns are 0."""
    names = list(report.candidates.name)
    if report.best not in names:
        return {}
    place = names.index(report.best)
    columns = {name: getattr(report.candidates, name) for name in (*_COLUMNS, *_REPLICAS)}
    return {name: column[place] if len(column) else 0 for name, column in columns.items()}


def _request(report: ServingSearchReport) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(report.request_json) if report.request_json else {}
    return found


def _limits(report: ServingSearchReport) -> dict[str, float]:
    """Return the limits on means, which the page's sliders begin with."""
    given = _request(report).get("targets", {}).get("limits", ())
    return {limit["metric"]: limit["limit_ms"] for limit in given if limit["percentile"] == 0}


def write_spec(spec: Mapping[str, Any], best: str, ties: Sequence[str]) -> str:
    """Return what a page's script is given, with the best that was answered and its ties."""
    return json.dumps({**spec, "best": best, "ties": list(ties)})


def to_column(values: Sequence[Any]) -> Any:
    """Return a column for a script: words as places in a list of them, numbers rounded."""
    if values and isinstance(values[0], str):
        words = list(dict.fromkeys(values))
        places = {word: place for place, word in enumerate(words)}
        return {"words": words, "at": [places[value] for value in values]}
    return [_to_number(value) for value in values]


def _to_number(value: Any) -> float | int | bool | None:
    if isinstance(value, bool | int):
        return value
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool | int):
        return number
    return float(f"{number:.{_DIGITS}g}") if isfinite(number) else None
