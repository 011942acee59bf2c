"""Everything readers ask of the catalog's tables."""

import hashlib
from collections.abc import Iterator
from datetime import datetime

import duckdb
import pyarrow as pa

from foretoken.catalog.store import Store
from foretoken.domain.measurement import (
    Coverage,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
    Snapshot,
)
from foretoken.wire.arrow import MEASUREMENT_SCHEMA, STORED_SCHEMA

# Where a row came from is no part of what it says.
_ORIGIN = ("source_file", "source_hash", "source_row")
_CONTENT = tuple(name for name in MEASUREMENT_SCHEMA.names if name not in _ORIGIN)


def read_measurements(store: Store, selection: MeasurementFilter) -> pa.RecordBatchReader:
    """Return the selected rows in the stored schema, read from the file as they are taken.

    The reader sees the catalog as it is now, whatever is recorded while it runs.
    """
    condition, values = _condition_of(selection)
    columns = ", ".join(STORED_SCHEMA.names)
    query = (
        f"SELECT {columns} FROM readable_measurement WHERE {condition} "  # noqa: S608 - values are bound
        "ORDER BY run_id, batch_index, row_index"
    )
    batches = _stream(store, query, values)
    first = next(batches, None)  # starts the query, so that its errors come from this call
    head = () if first is None else (first,)
    return pa.RecordBatchReader.from_batches(STORED_SCHEMA, _chained(head, batches))


def describe_coverage(store: Store) -> tuple[Coverage, ...]:
    """Return row counts per operator, device, topology, dtype and phase."""
    query = """
        SELECT operator, device, coalesce(topology, ''), dtype, phase, count(*),
            count(*) FILTER (len(flags) > 0), count(*) FILTER (status = 'failed'),
            list_sort(list_distinct(list(nullif(concat_ws(' ', framework, framework_version), ''))))
        FROM readable_measurement GROUP BY ALL ORDER BY ALL
    """
    with store.cursor() as cursor:
        rows = cursor.execute(query).fetchall()
    return tuple(
        Coverage(
            operator=operator,
            device=device,
            topology=topology,
            dtype=dtype,
            phase=phase,
            num_rows=num_rows,
            num_flagged=num_flagged,
            num_failed=num_failed,
            frameworks=tuple(frameworks),
        )
        for (
            operator,
            device,
            topology,
            dtype,
            phase,
            num_rows,
            num_flagged,
            num_failed,
            frameworks,
        ) in rows
    )


def list_runs(store: Store) -> tuple[RunSummary, ...]:
    """Return all runs, newest first."""
    query = """
        SELECT run_id, kind, tool, content_hash, source, licence, environment, started_at,
            completed_at, num_rows, num_flagged, num_failed
        FROM run_state ORDER BY started_at DESC, run_id
    """
    with store.cursor() as cursor:
        rows = cursor.execute(query).fetchall()
    return tuple(
        RunSummary(
            run=Run(
                run_id=row[0],
                kind=RunKind[row[1].upper()],
                tool=row[2],
                content_hash=row[3],
                source=row[4],
                licence=row[5],
                environment=row[6],
            ),
            started_at=_iso(row[7]),
            completed_at=_iso(row[8]),
            num_rows=row[9],
            num_flagged=row[10],
            num_failed=row[11],
        )
        for row in rows
    )


def describe_snapshot(store: Store, selection: MeasurementFilter) -> Snapshot:
    """Return the hash of the selected rows' content.

    Every row is hashed by itself and the hashes are added, so neither the order of rows nor the
    run, time or file they came by matters, and a repeated row counts twice.
    """
    condition, values = _condition_of(selection)
    # An unprintable separator and null mark: no text of a row contains them.
    fields = " || chr(31) || ".join(f"coalesce({name}::VARCHAR, chr(30))" for name in _CONTENT)
    query = f"""
        SELECT count(*), sum(md5_number_lower(content)), sum(md5_number_upper(content))
        FROM (SELECT {fields} AS content FROM readable_measurement WHERE {condition})
    """  # noqa: S608 - values are bound
    with store.cursor() as cursor:
        row = cursor.execute(query, values).fetchone()
    num_rows, low, high = row or (0, None, None)
    text = f"{num_rows} {low or 0} {high or 0}"
    return Snapshot(content_hash=hashlib.sha256(text.encode()).hexdigest(), num_rows=num_rows)


def _condition_of(selection: MeasurementFilter) -> tuple[str, list[str]]:
    """Return the SQL condition of a filter and the values of its placeholders."""
    terms, values = ["true"], []
    for name in ("operator", "device", "topology", "run_id"):
        if value := getattr(selection, name):
            terms.append(f"{name} = ?")
            values.append(value)
    if selection.framework:
        # "vllm" and "vllm 0.19" both find vllm 0.19.0; "vllm 0.1" does not.
        terms.append("regexp_matches(concat_ws(' ', framework, framework_version), ?)")
        values.append(f"^{_quoted(selection.framework)}([ .]|$)")
    if not selection.include_failed:
        terms.append("status = 'ok'")
    if not selection.include_flagged:
        terms.append("coalesce(len(flags), 0) = 0")
    return " AND ".join(terms), values


def _quoted(text: str) -> str:
    return "".join(f"\\{char}" if not char.isalnum() and char != " " else char for char in text)


def _stream(store: Store, query: str, values: list[str]) -> Iterator[pa.RecordBatch]:
    with store.cursor() as cursor:
        relation: duckdb.DuckDBPyRelation = cursor.sql(query, params=values)
        for batch in pa.RecordBatchReader.from_stream(relation):
            yield batch.cast(STORED_SCHEMA)


def _chained(
    head: tuple[pa.RecordBatch, ...], rest: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    yield from head
    yield from rest


def _iso(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat(timespec="seconds") + "Z"
