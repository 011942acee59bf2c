"""Results go to the catalog as well, titled and with their tables, and outlive this service."""

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from math import prod
from typing import Any, TypeVar

import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.ports import CatalogPort
from foretoken.domain.requests.search import CandidateColumns, CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import StrategyColumns, TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import RESULT_ARTIFACT, AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport
from foretoken.jobs.runner import JobProgress, JobRunner
from foretoken.wire.result_file import pack_report, table_fields, with_tables

# More sizes of clusters are given as the smallest to the largest.
_MAX_COUNTS = 3


def name_result(report: AnyReport) -> str:
    """Return the name of the scenario, its model and its devices."""
    if isinstance(report, ServingReport | TrainingReport | CapacityReport):
        scenario = _read(report.scenario_json)
        devices = f"{report.num_devices} {scenario.get('device', '')}"
    else:
        request = _read(report.request_json)
        scenario = request.get("scenario", {})
        devices = _devices(report, scenario, request.get("space", {}))
    model = scenario.get("model", {})
    name = model.get("name", "") if isinstance(model, Mapping) else str(model)
    return f"{scenario.get('name', '')}: {name} on {devices}"


def _devices(
    report: TrainingRunReport | ServingSearchReport | TrainingSearchReport,
    scenario: Mapping[str, Any],
    space: Mapping[str, Any],
) -> str:
    """Return the devices of a run, or of the clusters that a search compares."""
    device = str(scenario.get("device", ""))
    if isinstance(report, TrainingRunReport):
        return f"{report.num_devices} {device}"
    devices = " or ".join(space.get("devices") or (device,))
    if isinstance(report, ServingSearchReport):
        return f"up to {space['max_devices']} {devices}" if "max_devices" in space else devices
    if space.get("node_groups"):
        return " and ".join(map(_describe_nodes, space["node_groups"]))
    counts = space.get("num_devices") or (_count_devices(scenario.get("layout", {})),)
    return f"{_list_counts(counts)} {devices}"


def _describe_nodes(group: Mapping[str, Any]) -> str:
    size = group.get("devices_per_node") or ""
    return f"{group.get('num_nodes', 1)}x{size} {group['device']}"


def _count_devices(layout: Mapping[str, int]) -> int:
    return prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


def _list_counts(counts: Sequence[int]) -> str:
    few = len(counts) <= _MAX_COUNTS
    return " or ".join(map(str, counts)) if few else f"{min(counts)} to {max(counts)}"


def sum_up(report: AnyReport) -> str:
    """Return the figure that a reader of a list wants first."""
    if isinstance(report, CapacityReport):
        return f"{report.capacity_rps:.4g} requests/s"
    if isinstance(report, ServingSearchReport):
        deployments = report.candidates
        throughput = deployments.output_throughput_tps_per_gpu
        best = _describe_best(deployments, throughput, "output tokens/s/GPU")
        found = best or report.best or "none qualifies"
        return f"best of {report.num_points:,}: {found}{_say_simulated(report)}"
    if isinstance(report, TrainingSearchReport):
        strategies = report.candidates
        best = _describe_best(strategies, strategies.tokens_per_s_per_gpu, "tokens/s/GPU")
        return f"best of {report.num_points:,}: {best or 'none fits'}{_say_simulated(report)}"
    return _sum_up_one(report) if report.feasibility.is_feasible else "cannot run"


def _say_simulated(report: ServingSearchReport | TrainingSearchReport) -> str:
    return f"; {report.num_simulated:,} simulated" if report.num_simulated else ", in closed form"


def _describe_best(
    columns: CandidateColumns | StrategyColumns, throughput: Sequence[float], unit: str
) -> str:
    """Return the candidate of the first rank with its throughput; nothing where none has one."""
    ranked = [place for place, rank in enumerate(columns.rank) if rank > 0]
    if not ranked:
        return ""
    best = min(ranked, key=lambda place: columns.rank[place])
    return f"{columns.name[best]}, {throughput[best]:,.0f} {unit}"


def _sum_up_one(report: TrainingReport | TrainingRunReport | ServingReport) -> str:
    if isinstance(report, TrainingReport):
        step = describe_step(report.step_time_ms)
        return f"{step}, {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    if isinstance(report, TrainingRunReport):
        cost = f", {report.usd:,.0f} USD" if report.usd else ""
        return f"{report.num_tokens:.4g} tokens in {report.days:.4g} days{cost}"
    return f"{report.output_throughput_tps:,.0f} output tokens/s"


def _read(text: str) -> Mapping[str, Any]:
    content = json.loads(text) if text else {}
    return content if isinstance(content, Mapping) else {}


R = TypeVar("R")


def attach_tables(tables: Mapping[str, pa.Table], progress: JobProgress) -> None:
    """Keep tables with a job, by name.

    Raises:
        StorageFullError: they cannot be written.

    """
    for name, table in tables.items():
        with (
            progress.attach(f"{name}.arrow") as path,
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)


def fill_tables(report: R, jobs: JobRunner, job_id: str) -> R:
    """Return the report of a finished job with the columns that were attached as tables.

    Raises:
        as `open_table`.

    """
    names = list(table_fields(type(report)))
    tables = {name: open_table(jobs, job_id, name, names).read_all() for name in names}
    return with_tables(report, tables)


def open_table(
    jobs: JobRunner, job_id: str, table: str, known: Sequence[str]
) -> pa.RecordBatchReader:
    """Return a table of a finished job, one of the `known` names.

    Raises:
        InvalidRequestError: no such table.
        JobNotFinishedError, CancelledJobError, ForetokenError: as `JobRunner.result`.

    """
    if table not in known:
        raise InvalidRequestError.of_field("table", f"{table!r} is not one of {', '.join(known)}")
    path = jobs.attachment(job_id, f"{table}.arrow")
    return pa.ipc.open_stream(pa.memory_map(str(path)))


A = TypeVar("A", bound=AnyReport)

_log = logging.getLogger(__name__)

# Answers of calls that may wait to be stored: no more pile up while a catalog does not answer.
_MAX_WAITING = 16


class ResultKeeper:
    """Keeps the newest `max_kept` results in a catalog.

    A catalog that cannot be reached is no reason for a job to fail: what it ought to keep is logged
    and stays with the job.
    """

    def __init__(self, catalog: CatalogPort, max_kept: int) -> None:
        self._catalog = catalog
        self._max_kept = max_kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._places = threading.BoundedSemaphore(_MAX_WAITING)

    def close(self) -> None:
        """Wait until what is to be kept is."""
        self._thread.shutdown(wait=True)

    def keep_answer(self, kind: str, report: A) -> A:
        """Begin to store the answer of a call that was no job, and return it with its name.

        The caller does not wait for the catalog. Where too many answers wait for it, this one is
        not kept and has no name.
        """
        if not self._places.acquire(blocking=False):
            _log.warning("result not kept in the catalog kind=%s: too many wait for it", kind)
            return report
        job = Job(
            job_id=f"{kind}-{uuid.uuid4().hex[:12]}",
            kind=kind,
            state=JobState.SUCCEEDED,
            created_at=datetime.now(tz=UTC).isoformat(timespec="milliseconds"),
        )
        named = replace(report, job_id=job.job_id)
        self._thread.submit(self._keep_waiting, job, named)
        return named

    def _keep_waiting(self, job: Job, report: AnyReport) -> None:
        try:
            self.keep(job, report)
        except Exception:  # noqa: BLE001
            # Nobody awaits this: what goes wrong is reported here or nowhere.
            _log.exception("result not kept in the catalog job_id=%s", job.job_id)
        finally:
            self._places.release()

    def keep(self, job: Job, report: AnyReport) -> None:
        """Store a result that was reached; the oldest go."""
        content = pack_report(report)
        result = KeptResult(
            job_id=job.job_id,
            kind=job.kind,
            title=name_result(report),
            created_at=job.created_at,
            headline=sum_up(report),
        )
        artifact = Artifact(
            kind=RESULT_ARTIFACT,
            name=job.job_id,
            content_hash=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            created_at=job.created_at,
            metadata_json=json.dumps(schema.encode(replace(result, num_bytes=len(content)))),
        )
        try:
            self._catalog.store_artifact(artifact, (content,))
            for old in self._catalog.list_artifacts(RESULT_ARTIFACT)[self._max_kept :]:
                self._catalog.delete_artifact(RESULT_ARTIFACT, old.name)
        except ForetokenError as err:
            _log.warning("result not kept in the catalog job_id=%s: %s", job.job_id, err.message)
