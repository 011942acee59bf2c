"""Strategies: the answer of a training search, ranked again under other limits and prices."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from foretoken.app.web.views.answer import show_running, to_column, write_spec
from foretoken.app.web.views.results import pack_files, read
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit, send_json
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import StrategyFinalist, TrainingSearchReport
from foretoken.domain.units import GIB
from foretoken.simulator.launch.training import write_training_launch
from foretoken.simulator.report.search_candidates import Row, list_rows, ranked_rows
from foretoken.simulator.report.training_search_rows import (
    describe_verdict,
    figure_bounds,
    find_best,
    read_request,
)

_COLUMNS: Final = (
    "name",
    "device",
    "num_devices",
    "tp",
    "pp",
    "dp",
    "zero_stage",
    "recompute",
    "pipeline_schedule",
    "micro_batch_size",
    "step_time_ms",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu_ratio",
    "bubble_ratio",
    "exposed_communication_ratio",
    "usd_per_billion_tokens",
    "rank",
)
# How the page's script ranks and shows strategies: see `static/answer.js`.
_SPEC: Final = {
    "columns": [
        ["place", "Rank"],
        ["name", "Strategy"],
        ["device", "GPU"],
        ["num_devices", "GPUs"],
        ["step_time_ms", "Step (ms)"],
        ["tokens_per_s_per_gpu", "Tokens/s per GPU"],
        ["low", "Low", "interval"],
        ["high", "High", "interval"],
        ["mfu_ratio", "MFU", "share"],
        ["bubble_ratio", "Bubble", "share"],
        ["exposed_communication_ratio", "Exposed communication", "share"],
        ["reserved_gib", "Memory (GiB)"],
        ["margin_gib", "Free (GiB)"],
        ["cost", "USD per billion tokens"],
        ["days", "Days of the run"],
        ["usd", "USD of the run"],
    ],
    "words": ["name", "device", "recompute", "pipeline_schedule"],
    "limits": [
        {"name": "step", "column": "step_time_ms", "unit": "ms"},
        {"name": "memory", "column": "reserved_gib", "unit": "GiB"},
    ],
    "objectives": {
        "throughput_per_gpu": {"column": "tokens_per_s_per_gpu", "down": True},
        "step_time": {"column": "step_time_ms"},
        "cost": {"column": "cost"},
        "memory_headroom": {"column": "margin_gib", "down": True},
    },
    "x": {"column": "margin_gib", "label": "free memory of the fullest GPU (GiB)"},
    "y": {
        "column": "tokens_per_s_per_gpu",
        "low": "low",
        "high": "high",
        "label": "tokens/s per GPU",
    },
    "cost": {"column": "usd_per_billion_tokens", "tokens": 1_000_000_000},
    "describe": "{name} on {num_devices} {device}, {tokens_per_s_per_gpu} tokens/s per GPU, a step"
    " in {step_time_ms} ms, {margin_gib} GiB free",
    "run": True,
    "finalists": {
        "rpc": "watch_training_search",
        "address": "/strategies",
        "link": "Show the whole answer, with launch files",
        "cells": [
            {"paths": ["report.step_time_ms"]},
            {"paths": ["closed_form_ms"]},
            {"paths": ["report.tokens_per_s_per_gpu"]},
        ],
    },
}


def show(visit: Visit) -> Shown:
    """Show the answer, or how far it is."""
    job_id = visit.place["job"]
    if (running := show_running(visit, job_id)) is not None:
        return running
    report = _read(visit)
    rows = ranked_rows(list_rows(report.candidates))
    best = find_best(report, rows) if rows else {}
    by_place = sorted(report.finalists, key=_place_of)
    finalists = [(one, _find_refusal(one)) for one in by_place]
    content = {
        "job_id": job_id,
        "spec": write_spec(_SPEC, best.get("name", ""), report.ties),
        "report": report,
        "best": best,
        "bounds": figure_bounds(best) if best else (0.0, 0.0),
        "gib": GIB,
        "objective": read_request(report).get("objective", ""),
        "simulation": visit.first("simulation"),
        "finalists": finalists,
        "launched": next((one.name for one, refusal in finalists if not refusal), ""),
        "ruled_out": [(one, describe_verdict(one.verdict)) for one in report.ruled_out],
    }
    return Shown(template="strategies.html", content=content)


def send_candidates(visit: Visit) -> Sent:
    """Send the strategies that fit by column, with the bounds of their throughput."""
    report = _read(visit)
    columns = {name: list(getattr(report.candidates, name)) for name in _COLUMNS}
    rows: list[Row] = list_rows(report.candidates)
    bounds = [figure_bounds(row) for row in rows]
    columns["low"], columns["high"] = ([pair[end] for pair in bounds] for end in (0, 1))
    for name in ("reserved", "margin"):
        columns[f"{name}_gib"] = [row[f"{name}_bytes"] / GIB for row in rows]
    return send_json({name: to_column(values) for name, values in columns.items()})


def simulate(visit: Visit) -> Redirect:
    """Simulate a strategy for itself, with all its spans; go to the job."""
    job = visit.simulator.create_training_simulation(_find_strategy(visit, visit.posted))
    return Redirect(f"/jobs/simulator/{job.job_id}")


def send_launch(visit: Visit) -> Sent:
    """Send the files that start a strategy: the framework's arguments, a script, a job."""
    scenario = _find_strategy(visit, visit.asked)
    return pack_files(lambda folder: write_training_launch(scenario, folder), "training.zip")


def _read(visit: Visit) -> TrainingSearchReport:
    """Return the report of a search: of this service, or as the catalog keeps it.

    Raises:
        UnknownJobError: neither has it.
        InvalidRequestError: it is of another kind.

    """
    job_id = visit.place["job"]
    result, report = read(visit, job_id)
    if not isinstance(report, TrainingSearchReport):
        raise InvalidRequestError.of_field("job", f"{result.job_id} is no search for strategies")
    return report


def _find_refusal(finalist: StrategyFinalist) -> str:
    """Return why no files start a strategy; empty where they do."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_training_launch(_scenario_of(finalist), Path(folder))
        except InvalidRequestError as err:
            return err.message
    return ""


def _find_strategy(visit: Visit, given: Mapping[str, str]) -> TrainingScenario:
    """Return the scenario of the finalist that is named.

    Raises:
        InvalidRequestError: none of that name was simulated.

    """
    name = given.get("name", "")
    found = next((one for one in _read(visit).finalists if one.name == name), None)
    if found is None:
        raise InvalidRequestError.of_field("name", f"{name!r} was not simulated here")
    return _scenario_of(found)


def _place_of(finalist: StrategyFinalist) -> tuple[bool, int]:
    # What does not fit once it is simulated has no rank.
    return not finalist.rank, finalist.rank


def _scenario_of(finalist: StrategyFinalist) -> TrainingScenario:
    content: Any = json.loads(finalist.scenario_json)
    return schema.decode(TrainingScenario, content)
