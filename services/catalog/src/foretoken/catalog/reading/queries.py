"""Everything readers ask of the catalog's tables, but snapshots."""

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from foretoken.catalog.dims import DIM_COLUMNS, places_to_dims
from foretoken.catalog.reading.scan import locate_batches, scan_rows
from foretoken.catalog.reading.selection import VisibleBatches, find_visible_batches
from foretoken.catalog.reading.snapshot import format_time, pin_filter
from foretoken.catalog.storage.store import Store
from foretoken.domain.measurements.measurement import (
    Coverage,
    MeasuredSubject,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
)
from foretoken.wire.arrow import STORED_SCHEMA

# What every row brings itself.
_OWN = ("row_index", "flags")
_OF_BATCH = ("run_id", "batch_index", "recorded_at")
_SCANNED = tuple(
    name
    for field in STORED_SCHEMA.names
    if field not in (*_OWN, *_OF_BATCH)
    for name in (DIM_COLUMNS if field == "dims" else (field,))
)


def read_measurements(store: Store, selection: MeasurementFilter) -> pa.RecordBatchReader:
    """Return the selected rows in the stored schema, read from the file as they are taken.

    They come in the order they were recorded. The reader sees the catalog as it is now, whatever
    is recorded while it runs.

    Raises:
        UnknownDatasetError: there is no such snapshot.
        InvalidRequestError: the snapshot is not named clearly, or holds nothing of the kind.

    """
    pieces = _stream(store, selection)
    first = next(pieces, None)  # starts the query, so that its errors come from this call
    head = () if first is None else (first,)
    return pa.RecordBatchReader.from_batches(STORED_SCHEMA, itertools.chain(head, pieces))


def describe_coverage(store: Store) -> tuple[Coverage, ...]:
    """Return row counts per operator, device, topology, dtype and phase."""
    query = """
        SELECT operator, device, topology, dtype, phase, sum(num_rows)::BIGINT AS num_rows,
            sum(num_flagged)::BIGINT AS num_flagged, sum(num_failed)::BIGINT AS num_failed,
            list_sort(list_distinct(list(framework))) AS frameworks
        FROM (
            SELECT operator, device, coalesce(topology, '') AS topology, dtype, phase,
                nullif(concat_ws(' ', framework, framework_version), '') AS framework,
                count(*) AS num_rows, count(*) FILTER (len(flags) > 0) AS num_flagged,
                count(*) FILTER (status = 'failed') AS num_failed
            FROM readable_measurement
            GROUP BY operator, device, topology, dtype, phase, framework, framework_version
        )
        GROUP BY ALL ORDER BY ALL
    """
    return tuple(
        Coverage(**{**row, "frameworks": tuple(row["frameworks"])})
        for row in _fetch_dicts(store, query)
    )


def list_devices(store: Store) -> tuple[MeasuredSubject, ...]:
    """Return the devices that were measured, by name."""
    return _list_subjects(store, "device")


def list_models(store: Store) -> tuple[MeasuredSubject, ...]:
    """Return the models whose layers were measured, by name."""
    return _list_subjects(store, "model")


def list_runs(store: Store) -> tuple[RunSummary, ...]:
    """Return all runs, newest first; rows flagged since they were recorded count as flagged."""
    query = """
        SELECT run_state.*, num_flagged + coalesce(doubted.num_rows, 0) AS num_doubted
        FROM run_state LEFT JOIN (
            SELECT batch.run_id, count(*) AS num_rows
            FROM (SELECT DISTINCT batch_number, row_index FROM doubt WHERE until IS NULL)
            JOIN measurement USING (batch_number, row_index)
            JOIN batch USING (batch_number)
            WHERE coalesce(len(measurement.flags), 0) = 0
            GROUP BY batch.run_id
        ) AS doubted USING (run_id)
        ORDER BY started_at DESC, run_id
    """
    return tuple(
        RunSummary(
            run=Run(
                run_id=row["run_id"],
                kind=RunKind[row["kind"].upper()],
                tool=row["tool"],
                content_hash=row["content_hash"],
                source=row["source"],
                licence=row["licence"],
                environment=row["environment"],
            ),
            started_at=format_time(row["started_at"]),
            completed_at=format_time(row["completed_at"]),
            num_rows=row["num_rows"],
            num_flagged=row["num_doubted"],
            num_failed=row["num_failed"],
        )
        for row in _fetch_dicts(store, query)
    )


def _list_subjects(store: Store, column: str) -> tuple[MeasuredSubject, ...]:
    query = f"""
        SELECT name, sum(num_rows)::BIGINT AS num_rows, sum(num_flagged)::BIGINT AS num_flagged,
            sum(num_failed)::BIGINT AS num_failed, count(DISTINCT operator) AS num_operators,
            count(DISTINCT run_id) AS num_runs
        FROM (
            SELECT {column} AS name, operator, run_id, count(*) AS num_rows,
                count(*) FILTER (len(flags) > 0) AS num_flagged,
                count(*) FILTER (status = 'failed') AS num_failed
            FROM readable_measurement WHERE {column} IS NOT NULL GROUP BY ALL
        )
        GROUP BY name ORDER BY name
    """  # noqa: S608 - a column of our own
    return tuple(MeasuredSubject(**row) for row in _fetch_dicts(store, query))


def _fetch_dicts(store: Store, query: str) -> list[dict[str, Any]]:
    with store.cursor() as cursor:
        found = cursor.execute(query)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _stream(store: Store, selection: MeasurementFilter) -> Iterator[pa.RecordBatch]:
    with store.cursor() as cursor:
        cursor.begin()
        pinned = pin_filter(cursor, selection)
        batches = find_visible_batches(cursor, pinned)
        for rows in scan_rows(cursor, pinned, _SCANNED, batches):
            yield _to_stored(rows, batches)


def _to_stored(rows: pa.RecordBatch, batches: VisibleBatches) -> pa.RecordBatch:
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    columns["dims"] = places_to_dims(columns["operator"], columns)
    of_batch = batches.table.take(locate_batches(rows, batches))
    for name in _OF_BATCH:
        columns[name] = of_batch.column(name).combine_chunks()
    arrays = [columns[field.name].cast(field.type) for field in STORED_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=STORED_SCHEMA)
