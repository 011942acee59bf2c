"""The tables of job records: a row a job, the bytes of its files in pieces."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import duckdb
import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.job import Job
from foretoken.domain.job_record import JobFile, JobPiece, JobRecord

# DuckDB takes up some 2,000 values of a column at once: of these 32 MiB, of whole pieces 4 GiB.
_ROW_BYTES = 16 * 2**10
_ROWS_AT_ONCE = 128
_COLUMNS = (
    "service, job_json, request_json, version, worker, lease_ends_s, num_leases,"
    " num_interruptions, is_unwanted, change_number"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredJob:
    """A record, and when its lease ends, in s since 1970."""

    record: JobRecord
    lease_ends_s: float


def find_job(cursor: duckdb.DuckDBPyConnection, job_id: str, now_s: float) -> StoredJob | None:
    """Return a job with its files, if it is kept."""
    found = _fetch(cursor, "job_id = $job_id", {"job_id": job_id}, now_s)
    return found[0] if found else None


def get_job(cursor: duckdb.DuckDBPyConnection, job_id: str, now_s: float) -> StoredJob:
    """Return a job with its files.

    Raises:
        UnknownJobError: it is not kept.

    """
    found = find_job(cursor, job_id, now_s)
    if found is None:
        raise UnknownJobError.named(job_id, ())
    return found


def fetch_jobs(
    cursor: duckdb.DuckDBPyConnection, service: str, after: int, now_s: float
) -> list[JobRecord]:
    """Return the jobs of a service that changed, and those that have not ended, by their change."""
    where = "service = $service AND (change_number > $after OR NOT is_final)"
    found = _fetch(cursor, where, {"service": service, "after": after}, now_s)
    return sorted((one.record for one in found), key=lambda record: record.change_number)


def next_change(cursor: duckdb.DuckDBPyConnection) -> int:
    """Return the number of the next change."""
    row = cursor.execute("SELECT coalesce(max(change_number), 0) + 1 FROM job_record").fetchone()
    return int(row[0]) if row else 1


def insert_job(cursor: duckdb.DuckDBPyConnection, record: JobRecord) -> None:
    """Write a job that is not there yet."""
    cursor.execute(
        "INSERT INTO job_record (job_id, is_final, "  # noqa: S608 - our own columns
        f"{_COLUMNS}) VALUES ($job_id, false, $service, $job_json, $request_json, $version, '', 0,"
        " 0, 0, false, $change_number)",
        {
            "job_id": record.job.job_id,
            "service": record.service,
            "job_json": _pack(record.job),
            "request_json": record.request_json,
            "version": record.version,
            "change_number": record.change_number,
        },
    )


def update_job(cursor: duckdb.DuckDBPyConnection, record: JobRecord, lease_ends_s: float) -> None:
    """Write what has changed of a job."""
    cursor.execute(
        "UPDATE job_record SET job_json = $job_json, is_final = $is_final, worker = $worker,"
        " lease_ends_s = $lease_ends_s, num_leases = $num_leases,"
        " num_interruptions = $num_interruptions, is_unwanted = $is_unwanted,"
        " change_number = $change_number WHERE job_id = $job_id",
        {
            "job_id": record.job.job_id,
            "job_json": _pack(record.job),
            "is_final": record.job.state.is_final,
            "worker": record.worker,
            "lease_ends_s": lease_ends_s,
            "num_leases": record.num_leases,
            "num_interruptions": record.num_interruptions,
            "is_unwanted": record.is_unwanted,
            "change_number": record.change_number,
        },
    )


def forget_old(cursor: duckdb.DuckDBPyConnection, service: str, max_kept: int) -> None:
    """Delete the oldest jobs of a service that have ended, until no more than that are left."""
    rows = cursor.execute(
        "SELECT job_id FROM job_record WHERE service = $service AND is_final"
        " ORDER BY change_number DESC OFFSET $max_kept",
        {"service": service, "max_kept": max_kept},
    ).fetchall()
    for (job_id,) in rows:
        cursor.execute("DELETE FROM job_piece WHERE job_id = $job_id", {"job_id": job_id})
        cursor.execute("DELETE FROM job_record WHERE job_id = $job_id", {"job_id": job_id})


def write_piece(cursor: duckdb.DuckDBPyConnection, stored: JobRecord, piece: JobPiece) -> None:
    """Write bytes of a file, in place of what it has from there on.

    Raises:
        InvalidRequestError: the file has not so many bytes before them.

    """
    sizes = {file.name: file.num_bytes for file in stored.files}
    size = sizes.get(piece.name, 0)
    if piece.first_byte > size:
        raise InvalidRequestError.of_field(
            "first_byte", f"is {piece.first_byte}, and {piece.name} has {size} bytes"
        )
    content, first_byte = piece.content, piece.first_byte
    values = {"job_id": stored.job.job_id, "name": piece.name, "first_byte": first_byte}
    if first_byte < size:
        where = "WHERE job_id = $job_id AND name = $name AND first_byte + num_bytes > $first_byte"
        # The row that begins before and ends after keeps its beginning.
        rows = cursor.execute(
            f"SELECT first_byte, content FROM job_piece {where} AND first_byte < $first_byte",  # noqa: S608
            values,
        ).fetchall()
        cursor.execute(f"DELETE FROM job_piece {where}", values)  # noqa: S608
        for start, kept in rows:
            content, first_byte = kept[: piece.first_byte - start] + content, start
    starts = range(0, max(len(content), 1), _ROW_BYTES)
    pieces = [content[start : start + _ROW_BYTES] for start in starts]
    rows_of_it = pa.table(
        {
            "job_id": pa.array([stored.job.job_id] * len(pieces), pa.string()),
            "name": pa.array([piece.name] * len(pieces), pa.string()),
            "first_byte": pa.array([first_byte + start for start in starts], pa.int64()),
            "num_bytes": pa.array([len(part) for part in pieces], pa.int64()),
            "content": pa.array(pieces, pa.binary()),
        }
    )
    cursor.register("incoming", rows_of_it)
    cursor.execute("INSERT INTO job_piece SELECT * FROM incoming")
    cursor.unregister("incoming")


def drop_files(cursor: duckdb.DuckDBPyConnection, job_id: str, names: tuple[str, ...]) -> None:
    """Delete files of a job, where it has them."""
    for name in names:
        cursor.execute(
            "DELETE FROM job_piece WHERE job_id = $job_id AND name = $name",
            {"job_id": job_id, "name": name},
        )


def read_file(
    cursor: duckdb.DuckDBPyConnection, job_id: str, name: str, first_byte: int
) -> Iterator[bytes]:
    """Yield the bytes of a file from the first on."""
    found = cursor.execute(
        "SELECT first_byte FROM job_piece WHERE job_id = $job_id AND name = $name"
        " AND first_byte + num_bytes > $first_byte ORDER BY first_byte",
        {"job_id": job_id, "name": name, "first_byte": first_byte},
    ).fetchall()
    starts = [start for (start,) in found]
    for place in count(step=_ROWS_AT_ONCE):
        group = starts[place : place + _ROWS_AT_ONCE]
        if not group:
            return
        rows = cursor.execute(
            "SELECT first_byte, content FROM job_piece WHERE job_id = $job_id AND name = $name"
            " AND first_byte BETWEEN $start AND $stop ORDER BY first_byte",
            {"job_id": job_id, "name": name, "start": group[0], "stop": group[-1]},
        ).fetchall()
        yield b"".join(part[max(first_byte - start, 0) :] for start, part in rows)


def _fetch(
    cursor: duckdb.DuckDBPyConnection, where: str, values: dict[str, Any], now_s: float
) -> list[StoredJob]:
    rows = cursor.execute(
        f"SELECT {_COLUMNS} FROM job_record WHERE {where}",  # noqa: S608 - our own conditions
        values,
    ).fetchall()
    sizes = cursor.execute(
        "SELECT job_id, name, max(first_byte + num_bytes) FROM job_piece WHERE job_id IN"  # noqa: S608
        f" (SELECT job_id FROM job_record WHERE {where}) GROUP BY job_id, name ORDER BY name",
        values,
    ).fetchall()
    files: dict[str, list[JobFile]] = {}
    for job_id, name, num_bytes in sizes:
        files.setdefault(job_id, []).append(JobFile(name=name, num_bytes=num_bytes))
    return [_stored(row, files, now_s) for row in rows]


def _stored(row: tuple[Any, ...], files: dict[str, list[JobFile]], now_s: float) -> StoredJob:
    service, job_json, request_json, version, worker, ends_s, leases, stops, unwanted, change = row
    job = schema.decode(Job, json.loads(job_json), "job")
    record = JobRecord(
        service=service,
        job=job,
        request_json=request_json,
        version=version,
        worker=worker,
        is_leased=bool(worker) and ends_s > now_s and not job.state.is_final,
        num_leases=leases,
        num_interruptions=stops,
        is_unwanted=unwanted,
        change_number=change,
        files=tuple(files.get(job.job_id, ())),
    )
    return StoredJob(record=record, lease_ends_s=ends_s)


def _pack(job: Job) -> str:
    return json.dumps(schema.encode(job))
