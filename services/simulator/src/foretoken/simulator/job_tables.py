"""The Arrow tables that jobs of the simulator keep beside their results."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job_runner import JobProgress, JobRunner


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
