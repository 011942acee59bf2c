"""Kept results made of reports, to be compared."""

import json
from dataclasses import replace
from typing import Any

from report_examples import build_serving
from training_examples import build_training

from foretoken.domain.results.report import SeriesColumns, ServingReport
from foretoken.domain.results.result import REPORT_CLASSES, AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport


def keep(report: AnyReport, job_id: str, title: str = "") -> tuple[KeptResult, AnyReport]:
    """Return a report as the catalog gives it."""
    kind = next(kind for kind, cls in REPORT_CLASSES.items() if cls is type(report))
    known = KeptResult(
        job_id=job_id,
        kind=kind,
        title=title or f"title of {job_id}",
        created_at="2026-01-02T03:04:05.678+00:00",
        headline=f"headline of {job_id}",
    )
    return known, report


def training_of(**scenario: Any) -> TrainingReport:
    """Return a step of a pipeline, whose configuration has some keys."""
    return replace(build_training(), scenario_json=json.dumps(scenario))


def serving_of(rate_rps: float, **scenario: Any) -> ServingReport:
    """Return a run of four seconds, half of them without requests, with some keys."""
    counts = (2.0, 1.0, 0.0, 2.0)
    names = [name for name in SeriesColumns.__dataclass_fields__ if name != "start_s"]
    series = SeriesColumns(start_s=(0.0, 1.0, 2.0, 3.0), **dict.fromkeys(names, counts))
    report = build_serving(rate_rps)
    return replace(report, series=series, scenario_json=json.dumps(scenario))
