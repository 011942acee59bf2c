"""The Arrow tables that jobs of the simulator keep with their results."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.jobs.runner import JobProgress, JobRunner
from foretoken.wire.report_tables import table_fields, with_tables

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
