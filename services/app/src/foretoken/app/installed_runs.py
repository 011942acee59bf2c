"""The serving runs that others measured, of the catalog and of the starter."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from foretoken.domain.ports import CatalogPort
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.simulated_answer import read_finalist
from foretoken.simulator.validation.published_run import (
    AskedRun,
    PublishedRun,
    find_nearest,
    read_published,
)

# As `catalog install nvidia` keeps the table, and where it lies in a starter.
_KIND, TABLE = "raw_table", "silicon_sample"
STARTER_RUNS = f"_{TABLE}.csv.gz"


def list_installed_runs(catalog: CatalogPort, starter: str) -> tuple[PublishedRun, ...]:
    """Return the runs of the catalog's tables, else those of the starter in a folder ("": none)."""
    tables = list(_read_kept(catalog))
    return _read_runs(tables) if tables else _starter_runs(starter)


@cache
def _starter_runs(folder: str) -> tuple[PublishedRun, ...]:
    return _read_runs(_read_starter(folder))


def _read_runs(tables: Iterable[bytes]) -> tuple[PublishedRun, ...]:
    runs = (run for table in tables for run in read_published(table))
    return tuple({run.name: run for run in runs}.values())


def _read_kept(catalog: CatalogPort) -> Iterator[bytes]:
    for artifact in catalog.list_artifacts(_KIND):
        if json.loads(artifact.metadata_json).get("table") == TABLE:
            yield b"".join(catalog.read_artifact(_KIND, artifact.name))


def _read_starter(folder: str) -> Iterator[bytes]:
    path = Path(folder) / STARTER_RUNS
    if folder and path.is_file():
        yield gzip.decompress(path.read_bytes())


def show_nearest(report: ServingSearchReport, runs: Sequence[PublishedRun]) -> ServingSearchReport:
    """Return a report with a remark on the measured run that is most like its best deployment."""
    found = describe_nearest(report, runs)
    if not found:
        return report
    remarks = (*report.echo.remarks, f"nearest measured run: {found}")
    return replace(report, echo=replace(report.echo, remarks=remarks))


def describe_nearest(report: ServingSearchReport, runs: Sequence[PublishedRun]) -> str:
    """Return the measured run that is most like the best deployment; empty where none is."""
    found = find_nearest(runs, _asked_of(report)) if runs and report.finalists else None
    return found.describe() if found else ""


def _asked_of(report: ServingSearchReport) -> AskedRun:
    best = next((item for item in report.finalists if item.is_met), report.finalists[0])
    scenario = read_finalist(report, best)
    return AskedRun(
        model=scenario.model.name,
        device=scenario.device,
        input_tokens=scenario.workload.prefill.mean,
        output_tokens=scenario.workload.decode.mean,
        tp=scenario.layout.tp,
        concurrency=scenario.engine.max_num_seqs or 1,
        engine=scenario.engine.profile.partition("-")[0],
    )
