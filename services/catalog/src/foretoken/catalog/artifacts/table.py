"""The tables of artifacts: what is known of each, and their content in pieces."""

import itertools
from collections.abc import Iterator
from dataclasses import fields

import duckdb
import pyarrow as pa

from foretoken.catalog.artifacts.check import parse_time
from foretoken.catalog.artifacts.spool import Spool
from foretoken.domain.errors import UnknownArtifactError
from foretoken.domain.measurements.artifact import Artifact

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
        starts = range(0, len(group), _PIECE_BYTES)
        columns = {
            "kind": [artifact.kind] * len(starts),
            "name": [artifact.name] * len(starts),
            "first_byte": [first_byte + start for start in starts],
            "content": [group[start : start + _PIECE_BYTES] for start in starts],
        }
        yield pa.RecordBatch.from_pydict(columns, schema=_CHUNK_SCHEMA)
        first_byte += len(group)
