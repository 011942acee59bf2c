"""The catalog: records measurements and hands them out again."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from foretoken.catalog.artifacts.keeping import KeepsArtifacts
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.job_records.keeping import KeepsJobRecords
from foretoken.catalog.quality.review import Listener, RunReview, review
from foretoken.catalog.reading import queries, snapshot
from foretoken.catalog.reading.snapshot import diff_snapshots
from foretoken.catalog.recording.ingest import Ingest, IngestStatistics
from foretoken.catalog.sql.query_service import OnLeave, SqlQueryService, SqlStatistics
from foretoken.catalog.storage.store import Store
from foretoken.catalog.upkeep import compaction, retention
from foretoken.catalog.upkeep.backup import stream_backup
from foretoken.catalog.upkeep.room import BackupNote, DiskUsage, disk_usage
from foretoken.domain.caller import Allowance, current_caller
from foretoken.domain.hardware.device import find_device
from foretoken.domain.job import Job, JobState, error_of_job
from foretoken.domain.measurements.measurement import (
    REVIEW_JOB,
    ArrowStream,
    BatchReceipt,
    CheckRequest,
    CompactReport,
    Coverage,
    MeasuredSubject,
    MeasurementBatch,
    MeasurementFilter,
    PruneReport,
    PruneRequest,
    QualityReport,
    Run,
    RunSummary,
    Snapshot,
    SnapshotDiff,
    SqlQuery,
)
from foretoken.domain.name import check_name
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.jobs.runner import JobProgress, JobRunner
from foretoken.jobs.service import RunsJobs

_CHECK = "check"
_DAY_S = 86_400.0


def _now() -> datetime:
    return datetime.now(UTC)


class CatalogService(RunsJobs, KeepsArtifacts, KeepsJobRecords):
    """Implements `CatalogAdminPort` on one DuckDB file. Safe to use from several threads."""

    def __init__(self, config: CatalogConfig, clock: Callable[[], datetime] = _now) -> None:
        """Keep the configuration; `clock` gives the time in UTC."""
        folder = Path(config.state_folder or f"{config.path}.state").expanduser()
        self._config = config
        self._clock = clock
        self._store = Store(config)
        RunsJobs.__init__(self, JobRunner(folder / "jobs"))
        KeepsArtifacts.__init__(self, self._store, config.max_artifact_bytes)
        self._backups = BackupNote(folder)
        KeepsJobRecords.__init__(self, config, clock)
        self._ingest = Ingest(self._store, clock, config.max_batch_rows, self._review_import)
        self._sql = SqlQueryService(self._store, config)
        self._recorded = Allowance(
            config.max_recorded_bytes_per_caller, _DAY_S, "bytes of measurements a day"
        )

    def open(self) -> None:
        """Open the file, or make it.

        Runs that a crash kept from being reviewed are reviewed now.

        Raises:
            CatalogBusyError: another process, or another catalog of this one, has it open.
            CorruptCatalogError: it cannot be read as a catalog.
            InvalidRequestError: the path cannot be a file, nor its jobs' folder a folder.
            StorageFullError: its disk is full.

        """
        self._store.open()
        try:
            self._sql.open()
            self._jobs.open()
            self._ingest.review_missed_runs()
        except BaseException:
            self._sql.close()
            self._store.close()
            raise

    def close(self) -> None:
        """Cancel what runs and close the file; what was acknowledged is in it.

        Queries that run are ended. Rows half read keep the file until their reader lets go.
        """
        self._jobs.close()
        self._sql.close()
        self.close_records()
        self._store.close()

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        Of an import several batches may be read and stored before the first has its receipt.

        Raises:
            RunConflictError: a run of this id has other content.
            InvalidRequestError: a batch is not in the measurement schema, or a row of it is not
                a measurement; the batches before it stay.
            UnknownOperatorError, UnknownDeviceError, UnknownTopologyError: a row names one.
            StorageFullError: the disk is full; what has a receipt is there, the rest can be sent
                again once there is room.
            QuotaError: the caller has recorded as much as it may.

        """
        check_name(run.run_id, "run_id")
        yield from self._ingest.record(run, self._count_bytes(batches))

    def _count_bytes(self, batches: Iterable[MeasurementBatch]) -> Iterator[MeasurementBatch]:
        caller = current_caller()
        for batch in batches:
            self._recorded.check(caller)
            yield batch
            rows = batch.rows
            self._recorded.spend(caller, rows.nbytes if isinstance(rows, pa.Table) else 0)

    def statistics(self) -> IngestStatistics:
        """Return what was recorded since the catalog was opened."""
        return self._ingest.statistics()

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        """Return the selected rows, in the order they were recorded.

        Raises:
            UnknownDatasetError: there is no such snapshot.
            InvalidRequestError: the snapshot is not named clearly, or holds nothing of the kind.

        """
        stream: ArrowStream = queries.read_measurements(self._store, selection)
        return stream

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, topology, dtype and phase."""
        return queries.describe_coverage(self._store)

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""
        return queries.list_runs(self._store)

    def list_devices(self) -> tuple[MeasuredSubject, ...]:
        """Return the devices that were measured, by name."""
        return queries.list_devices(self._store)

    def list_models(self) -> tuple[MeasuredSubject, ...]:
        """Return the models whose layers were measured, by name."""
        return queries.list_models(self._store)

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects, and what is stored under it.

        Raises:
            UnknownDatasetError, InvalidRequestError: as `read_measurements`.

        """
        return snapshot.describe_snapshot(self._store, selection)

    def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        """Keep what the filter selects now, on behalf of a holder if one is named.

        Raises:
            UnknownDatasetError, InvalidRequestError: as `read_measurements`.

        """
        return snapshot.create_snapshot(self._store, selection, holder, self._clock())

    def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the stored snapshots, newest first."""
        return snapshot.list_snapshots(self._store)

    def diff_snapshots(self, before: str, after: str) -> SnapshotDiff:
        """Return what the rows of two stored snapshots differ in.

        Raises:
            UnknownDatasetError, InvalidRequestError: as `read_measurements`.

        """
        return diff_snapshots(self._store, before, after)

    def release_snapshot(self, content_hash: str, holder: str) -> Snapshot:
        """Take a holder from a snapshot; harmless when it does not hold it.

        Raises:
            UnknownDatasetError, InvalidRequestError: as `read_measurements`.

        """
        return snapshot.release_snapshot(self._store, content_hash, holder)

    def delete_snapshot(self, content_hash: str) -> None:
        """Forget a snapshot; its rows stay.

        Raises:
            SnapshotInUseError: something holds it.
            UnknownDatasetError, InvalidRequestError: as `read_measurements`.

        """
        snapshot.delete_snapshot(self._store, content_hash)

    def create_check(self, request: CheckRequest) -> Job:
        """Start judging stored rows again, all batches and runs together.

        Raises:
            UnknownOperatorError, UnknownDeviceError: no file of that name.

        """
        checked = replace(
            request,
            operator=find_operator(request.operator).name if request.operator else "",
            device=find_device(request.device).name if request.device else "",
        )
        return self._jobs.create(
            _CHECK,
            lambda progress: self._check(checked, progress),
            title=f"{checked.operator or 'all operators'} on {checked.device or 'all devices'}",
        )

    def _review_import(self, review: Callable[[Listener], RunReview]) -> None:
        """Review an import as a job, for it may take a minute, which others can watch."""
        job = self._jobs.create(REVIEW_JOB, lambda progress: review(progress.update))
        *_, ended = self._jobs.watch(job.job_id)
        if ended.state is not JobState.SUCCEEDED:
            raise error_of_job(ended)

    def get_check_report(self, job_id: str) -> QualityReport:
        """Return the result of a finished check."""
        return self._jobs.result(job_id, QualityReport)

    def query_sql(self, query: SqlQuery, on_leave: OnLeave | None = None) -> ArrowStream:
        """Return the result of a read-only SQL query, computed as it is read by another process.

        The process is ended where the query takes more than it may, where the reader is let go, and
        where `on_leave` tells that the caller has left.

        Raises:
            InvalidRequestError: it is not one query of the public views.
            QueryLimitError: it takes more time, memory or rows than it may; also while it is read.
            QueueFullError: too many are being answered.

        """
        stream: ArrowStream = self._sql.ask(query, on_leave)
        return stream

    def sql_statistics(self) -> SqlStatistics:
        """Return what was asked in SQL since the service was made."""
        return self._sql.statistics()

    @property
    def num_readers(self) -> int:
        """How many reads and writes use the database at the moment."""
        return self._store.num_users

    def size_bytes(self) -> int:
        """Return the storage the catalog takes, in bytes."""
        return self._store.size_bytes()

    def disk_usage(self) -> DiskUsage:
        """Return how large the volume with the catalog's files is, and what of it is free."""
        return disk_usage(Path(self._config.path).expanduser())

    def last_backup_s(self) -> float | None:
        """Return when the last backup was read to its end, in s since 1970; 0 for never.

        None of a lake: it is backed up with PostgreSQL and the bucket.
        """
        return None if self._config.lake is not None else self._backups.last_s()

    def backup(self) -> Iterator[bytes]:
        """Yield a copy of the catalog as it is now, in pieces; recording goes on meanwhile.

        Raises:
            StorageFullError: there is no room next to the catalog for a copy.

        """
        yield from stream_backup(self._store)
        self._backups.note(self._clock())

    def prune(self, request: PruneRequest) -> PruneReport:
        """Delete old runs, but none that a snapshot needs.

        Raises:
            InvalidRequestError: the age is not a number of days from 0 to 36,500.

        """
        return retention.prune(self._store, request, self._clock())

    def compact(self) -> CompactReport:
        """Write the catalog's files anew without the room that deleted rows left.

        Raises:
            CatalogBusyError: it was being read all the time; all is as before.
            StorageFullError: there is no room next to the catalog for the new file.

        """
        return compaction.compact(self._store)

    def _check(self, request: CheckRequest, progress: JobProgress) -> QualityReport:
        return review(self._store, request, self._clock(), progress.update)
