"""The catalog's half that keeps jobs for the processes of other services.

Records lie in a file next to the catalog's, or in the PostgreSQL of a lake. Not among the
measurements: what changes every second would have their readers open them anew, and in a lake be a
version of it each time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import duckdb

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.job_records import table
from foretoken.catalog.storage.error import translate, translated
from foretoken.catalog.storage.lake import WriterLock, explain_lake, load_extension
from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import ForetokenError, InvalidRequestError, JobLeaseError
from foretoken.domain.job import JobState
from foretoken.domain.job_record import JobRecord, JobUpdate
from foretoken.domain.name import check_name

_TABLES = """
    CREATE TABLE IF NOT EXISTS job_record (
        job_id VARCHAR, service VARCHAR, job_json VARCHAR, request_json VARCHAR, version VARCHAR,
        worker VARCHAR, lease_ends_s DOUBLE, num_leases BIGINT, num_interruptions BIGINT,
        is_unwanted BOOLEAN, is_final BOOLEAN, change_number BIGINT
    );
    CREATE TABLE IF NOT EXISTS job_piece (
        job_id VARCHAR, name VARCHAR, first_byte BIGINT, num_bytes BIGINT, content BLOB
    );
"""
# A few thousand short rows, and pieces of 16 KiB of which some 2,000 are read at once.
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "memory_limit": "256MB",
    "autoinstall_known_extensions": False,
}


class JobDatabase:
    """Opens the database when it is first used; safe to use from several threads."""

    def __init__(self, config: CatalogConfig) -> None:
        """Keep where it lies."""
        self._path = Path(f"{config.path}.jobs").expanduser()
        self._lake = config.lake
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._writers = (
            WriterLock(self._lake.postgres, _lock_name(self._lake)) if self._lake else None
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Hand out a connection that alone reads and writes; at the end that is on disk, or undone.

        Raises:
            CatalogBusyError: another process has the file open, or PostgreSQL does not answer.
            StorageFullError: the disk is full.

        """
        with self._lock, translated(self._explain):
            connection = self._open()
            # Taken before the transaction, which would not see what came while it waited.
            with self._writers.hold() if self._writers else contextlib.nullcontext():
                connection.begin()
                try:
                    yield connection
                    connection.commit()
                except BaseException as err:
                    with contextlib.suppress(duckdb.Error):
                        connection.rollback()
                    if isinstance(err, duckdb.Error):
                        # The disk was full, or PostgreSQL started anew: opened again next time.
                        self._close()
                    raise

    def close(self) -> None:
        """Close it; harmless where it is not open."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._writers is not None:
            self._writers.close()

    def _open(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            with contextlib.ExitStack() as undo:
                connection = duckdb.connect(":memory:", config=_SETTINGS)
                undo.callback(connection.close)
                connection.execute("SET enable_progress_bar = false")
                if self._lake is None:
                    connection.execute(f"ATTACH {quote(str(self._path))} AS jobs")
                    connection.execute("USE jobs")
                else:
                    _attach_postgres(connection, self._lake)
                connection.execute(_TABLES)
                undo.pop_all()
            self._connection = connection
        return self._connection

    def _explain(self, error: duckdb.Error) -> ForetokenError:
        if self._lake is not None and (found := explain_lake(error, self._lake.data_path)):
            return found
        return translate(error, str(self._path))


def _lock_name(lake: LakeConfig) -> str:
    return f"foretoken jobs {lake.schema_name}"


def _attach_postgres(connection: duckdb.DuckDBPyConnection, lake: LakeConfig) -> None:
    load_extension(connection, "postgres_scanner")
    connection.execute(f"ATTACH {quote(lake.postgres)} AS jobs (TYPE postgres)")
    schema = f"{lake.schema_name}_jobs"
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS jobs.{schema}")
    connection.execute(f"USE jobs.{schema}")


# Longer, and nobody goes on with the jobs of a process that died.
_MAX_LEASE_S = 3600.0


class KeepsJobRecords:
    """Implements `JobRecordsPort`. Safe to use from several threads.

    Leases end by this process's clock. What a clock that jumps may cause is a job that two workers
    do at once; the number of the lease decides which of them is listened to.
    """

    def __init__(self, config: CatalogConfig, clock: Callable[[], datetime]) -> None:
        """Keep where the records lie, and the clock."""
        self._records = JobDatabase(config)
        self._max_kept = config.max_kept_jobs
        self._time = clock

    def close_records(self) -> None:
        """Let go of where the records lie, until they are used again."""
        self._records.close()

    def create_job_record(self, record: JobRecord) -> JobRecord:
        """Keep a new job that nobody works on yet; the same again changes nothing.

        The oldest jobs of the service that have ended make room for it.

        Raises:
            InvalidRequestError: it has ended already.

        """
        if record.job.state.is_final:
            raise InvalidRequestError.of_field("record.job.state", "a new job has not ended")
        with self._records.transaction() as cursor:
            found = table.find_job(cursor, record.job.job_id, self._now_s())
            if found is not None:
                return found.record
            table.forget_old(cursor, record.service, self._max_kept)
            table.insert_job(cursor, replace(record, change_number=table.next_change(cursor)))
            return table.get_job(cursor, record.job.job_id, self._now_s()).record

    def lease_job(self, job_id: str, worker: str, lease_s: float) -> JobRecord:
        """Give a job to a worker for so long, with what was requested.

        Raises:
            UnknownJobError: it is not kept.
            JobLeaseError: another worker has it, or it has ended.
            InvalidRequestError: no such lease can be.

        """
        check_name(worker, "worker")
        if not 0 < lease_s <= _MAX_LEASE_S:
            raise InvalidRequestError.of_field("lease_s", f"is more than 0, up to {_MAX_LEASE_S:g}")
        with self._records.transaction() as cursor:
            record = table.get_job(cursor, job_id, self._now_s()).record
            if record.job.state.is_final or (record.is_leased and record.worker != worker):
                raise JobLeaseError(f"job {job_id} is {_describe(record)}", job_id=job_id)
            if not record.is_leased:
                has_died = bool(record.worker) and record.job.state is JobState.RUNNING
                record = replace(
                    record,
                    worker=worker,
                    num_leases=record.num_leases + 1,
                    num_interruptions=record.num_interruptions + has_died,
                    change_number=table.next_change(cursor),
                )
            table.update_job(cursor, record, self._now_s() + lease_s)
            return replace(record, is_leased=True)

    def update_job(self, update: JobUpdate) -> JobRecord:
        """Store what the worker of a lease has to say, all of it or nothing.

        A lease that is over and that nobody else took is as good as before.

        Raises:
            UnknownJobError: it is not kept.
            JobLeaseError: the lease is another's by now, or the job has ended otherwise.
            InvalidRequestError: a piece is not next to what its file has.

        """
        job = update.job
        with self._records.transaction() as cursor:
            record = table.get_job(cursor, job.job_id, self._now_s()).record
            is_holder = (record.worker, record.num_leases) == (update.worker, update.num_leases)
            if is_holder and record.job == job and job.state.is_final:
                # The answer to the first time was lost.
                return replace(record, request_json="")
            if not is_holder or record.job.state.is_final:
                raise JobLeaseError(f"job {job.job_id} is {_describe(record)}", job_id=job.job_id)
            for piece in update.pieces:
                table.write_piece(cursor, record, piece)
                record = table.get_job(cursor, job.job_id, self._now_s()).record
            table.drop_files(cursor, job.job_id, update.dropped)
            is_left = not update.lease_s and not job.state.is_final
            if job != record.job or update.pieces or update.dropped or is_left:
                record = replace(record, job=job, change_number=table.next_change(cursor))
            if is_left:
                record = replace(record, worker="")
            table.update_job(cursor, record, self._now_s() + update.lease_s)
            return replace(table.get_job(cursor, job.job_id, self._now_s()).record, request_json="")

    def stop_job(self, job_id: str) -> JobRecord:
        """Want a job no more: its worker is to stop, and where it has none it ends at once.

        Raises:
            UnknownJobError: it is not kept.

        """
        with self._records.transaction() as cursor:
            stored = table.get_job(cursor, job_id, self._now_s())
            record = stored.record
            if not (record.job.state.is_final or record.is_unwanted):
                record = replace(record, is_unwanted=True, change_number=table.next_change(cursor))
            if not (record.job.state.is_final or record.is_leased):
                now = self._time().isoformat(timespec="milliseconds")
                job = replace(record.job, state=JobState.CANCELLED, finished_at=now)
                record = replace(record, job=job)
            table.update_job(cursor, record, stored.lease_ends_s)
        return replace(record, request_json="")

    def list_job_records(self, service: str, after: int = 0) -> tuple[JobRecord, ...]:
        """Return the jobs of a service that changed after that number, and all that have not ended.

        They are in the order of their changes, without what was requested.
        """
        check_name(service, "service")
        with self._records.transaction() as cursor:
            found = table.fetch_jobs(cursor, service, after, self._now_s())
        return tuple(replace(record, request_json="") for record in found)

    def get_job_record(self, job_id: str) -> JobRecord:
        """Return a job as it is now, with what was requested.

        Raises:
            UnknownJobError: it is not kept.

        """
        with self._records.transaction() as cursor:
            return table.get_job(cursor, job_id, self._now_s()).record

    def read_job_file(self, job_id: str, name: str, first_byte: int = 0) -> Iterator[bytes]:
        """Yield a file of a job from the `first_byte` on; nothing where there is none.

        Raises:
            UnknownJobError: the job is not kept.
            InvalidRequestError: a negative place.

        """
        if first_byte < 0:
            raise InvalidRequestError.of_field("first_byte", "must not be negative")
        with self._records.transaction() as cursor:
            table.get_job(cursor, job_id, self._now_s())
            # Whoever reads slowly must not keep the others out.
            pieces = list(table.read_file(cursor, job_id, name, first_byte))
        yield from pieces

    def _now_s(self) -> float:
        return self._time().timestamp()


def _describe(record: JobRecord) -> str:
    if record.job.state.is_final:
        return f"{record.job.state.name.lower()} already"
    return f"with worker {record.worker}" if record.is_leased else "left to others"
