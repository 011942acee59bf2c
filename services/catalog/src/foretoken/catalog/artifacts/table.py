"""The tables of artifacts: checked before they are stored, their content in pieces."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.artifacts.spool import Spool
from foretoken.domain.errors import InvalidRequestError, UnknownArtifactError
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.name import check_name
from foretoken.domain.text_file import parse_json

# A hundred of these, a page of a list, fit into a message of 16 MiB.
MAX_METADATA_BYTES = 128 * 2**10
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_artifact(artifact: Artifact, max_bytes: int) -> None:
    """Check what is said of a file of at most `max_bytes`.

    Raises:
        InvalidRequestError: a field cannot be right, or the file is too large; names the field.

    """
    for field in ("kind", "name"):
        check_name(getattr(artifact, field), field)
    if not _SHA256.fullmatch(artifact.content_hash):
        raise InvalidRequestError.of_field(
            "content_hash", "is the content's SHA-256: 64 digits of 0-9 and a-f"
        )
    if artifact.num_bytes < 0:
        raise InvalidRequestError.of_field("num_bytes", "must not be negative")
    if artifact.num_bytes > max_bytes:
        raise InvalidRequestError.of_field(
            "num_bytes",
            f"is {artifact.num_bytes}, the catalog keeps files of up to {max_bytes} bytes; raise "
            "its max_artifact_bytes",
        )
    parse_time(artifact.created_at)
    _check_metadata(artifact.metadata_json)


def parse_time(created_at: str) -> datetime:
    """Return the moment that a time in UTC says.

    Raises:
        InvalidRequestError: it is not ISO 8601, or not in UTC.

    """
    try:
        moment = datetime.fromisoformat(created_at)
    except ValueError as err:
        raise InvalidRequestError.of_field("created_at", f"is not ISO 8601: {err}") from err
    if moment.utcoffset():
        raise InvalidRequestError.of_field("created_at", f"{created_at} is not in UTC")
    return moment.replace(tzinfo=UTC)


def _check_metadata(text: str) -> None:
    if len(text.encode()) > MAX_METADATA_BYTES:
        raise InvalidRequestError.of_field(
            "metadata_json", f"exceeds {MAX_METADATA_BYTES} bytes; put it into the file"
        )
    parse_json(text, "metadata_json")


# DuckDB takes up the values of 2048 rows of a column at once, whatever filter there is: here 32
# MiB. With pieces of 2 MiB it is 4 GiB, and reading fails where memory is short.
_PIECE_BYTES = 16 * 2**10
# Pieces that go to the database together: 2 MiB.
_GROUP_ROWS = 128
# Pieces that are asked for at once: 32 MiB. All as one stream takes DuckDB 1.5 nine times as long.
_READ_ROWS = 2048
_CHUNK_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("first_byte", pa.int64()),
        ("content", pa.binary()),
    ]
)
_FIELDS = tuple(field.name for field in fields(Artifact))
_OF_ONE = "WHERE kind = $kind AND name = $name"


def fetch_artifacts(cursor: duckdb.DuckDBPyConnection, kind: str) -> tuple[Artifact, ...]:
    """Return what is kept of a kind, newest first."""
    rows = cursor.execute(
        f"SELECT {', '.join(_FIELDS)} FROM artifact WHERE kind = ? ORDER BY name",  # noqa: S608
        [kind],
    ).fetchall()
    found = [Artifact(**dict(zip(_FIELDS, row, strict=True))) for row in rows]
    return tuple(sorted(found, key=lambda one: parse_time(one.created_at), reverse=True))


def find_artifact(cursor: duckdb.DuckDBPyConnection, kind: str, name: str) -> Artifact:
    """Return the stored artifact of a kind and name.

    Raises:
        UnknownArtifactError: there is none; names the nearest of the kind.

    """
    stored = {f"{kind}/{artifact.name}": artifact for artifact in fetch_artifacts(cursor, kind)}
    return UnknownArtifactError.look_up(f"{kind}/{name}", stored)


def find_same(cursor: duckdb.DuckDBPyConnection, artifact: Artifact) -> Artifact | None:
    """Return what is stored of the same kind, name and content, if anything is."""
    return next(
        (
            stored
            for stored in fetch_artifacts(cursor, artifact.kind)
            if (stored.name, stored.content_hash) == (artifact.name, artifact.content_hash)
        ),
        None,
    )


def write_artifact(cursor: duckdb.DuckDBPyConnection, artifact: Artifact) -> None:
    """Write what is known of a file, new or in place of what was; it stays as active as it was."""
    values = {name: getattr(artifact, name) for name in _FIELDS if name != "is_active"}
    cursor.execute(
        "UPDATE artifact SET content_hash = $content_hash, num_bytes = $num_bytes,"  # noqa: S608
        f" created_at = $created_at, metadata_json = $metadata_json {_OF_ONE}",
        values,
    )
    cursor.execute(
        "INSERT INTO artifact SELECT $kind, $name, $content_hash, $num_bytes, $created_at,"
        f" $metadata_json, false WHERE NOT EXISTS (FROM artifact {_OF_ONE})",
        values,
    )


def write_content(cursor: duckdb.DuckDBPyConnection, artifact: Artifact, spool: Spool) -> None:
    """Write a file's content, in place of what was."""
    delete_content(cursor, artifact.kind, artifact.name)
    rows = pa.RecordBatchReader.from_batches(_CHUNK_SCHEMA, _chunks(artifact, spool))
    cursor.register("incoming", rows)
    cursor.execute("INSERT INTO artifact_chunk SELECT * FROM incoming")
    cursor.unregister("incoming")


def read_content(cursor: duckdb.DuckDBPyConnection, kind: str, name: str, spool: Spool) -> None:
    """Put a file's content, which the database may give in any order, into an empty spool.

    It ends before the first gap of the size that is asked for at once.
    """
    query = (
        f"SELECT first_byte, content FROM artifact_chunk {_OF_ONE}"  # noqa: S608 - values are bound
        " AND first_byte >= $start AND first_byte < $start + $num_bytes"
    )
    num_bytes = _READ_ROWS * _PIECE_BYTES
    for start in itertools.count(step=num_bytes):
        values = {"kind": kind, "name": name, "start": start, "num_bytes": num_bytes}
        rows = cursor.execute(query, values).fetchall()
        if not rows:
            return
        for first_byte, piece in rows:
            spool.put(first_byte, piece)


def activate(cursor: duckdb.DuckDBPyConnection, kind: str, name: str) -> None:
    """Make one the active one of its kind, and no other."""
    cursor.execute(
        "UPDATE artifact SET is_active = (name = $name)"
        " WHERE kind = $kind AND is_active != (name = $name)",
        {"kind": kind, "name": name},
    )


def delete_row(cursor: duckdb.DuckDBPyConnection, kind: str, name: str) -> None:
    """Delete what is known of a file."""
    cursor.execute(f"DELETE FROM artifact {_OF_ONE}", {"kind": kind, "name": name})  # noqa: S608


def delete_content(cursor: duckdb.DuckDBPyConnection, kind: str, name: str) -> None:
    """Delete a file's content, where there is any."""
    cursor.execute(f"DELETE FROM artifact_chunk {_OF_ONE}", {"kind": kind, "name": name})  # noqa: S608


def _chunks(artifact: Artifact, spool: Spool) -> Iterator[pa.RecordBatch]:
    first_byte = 0
    for group in spool.pieces(_GROUP_ROWS * _PIECE_BYTES):
        starts = np.arange(0, len(group), _PIECE_BYTES)
        ends, count = np.append(starts, len(group)).astype(np.int32), len(starts)
        # Of lists and texts Arrow looks for pandas first, a fifth of a second to import.
        first_bytes, pieces = pa.py_buffer(starts + first_byte), pa.py_buffer(ends)
        columns = [
            _repeat(artifact.kind, count),
            _repeat(artifact.name, count),
            pa.Array.from_buffers(pa.int64(), count, [None, first_bytes]),
            pa.Array.from_buffers(pa.binary(), count, [None, pieces, pa.py_buffer(group)]),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=_CHUNK_SCHEMA)
        first_byte += len(group)


def _repeat(text: str, count: int) -> pa.StringArray:
    encoded = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(encoded))
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(encoded * count))
