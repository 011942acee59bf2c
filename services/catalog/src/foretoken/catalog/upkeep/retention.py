"""Keep the catalog small: delete old runs nobody needs."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from foretoken.catalog.reading.snapshot import runs_needed_by_snapshots
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import PruneReport, PruneRequest

_MAX_DAYS = 36_500
# A run without its last batch may still be being sent: it is left alone for a day at least.
_UNFINISHED_DAYS = 1.0
_OLD_RUNS = """
    SELECT run_id, num_rows FROM run_state
    LEFT JOIN (SELECT run_id, max(recorded_at) AS last_at FROM batch GROUP BY run_id)
    USING (run_id)
    WHERE coalesce(last_at, started_at)
            < CASE WHEN completed_at IS NULL THEN $unfinished_limit ELSE $limit END
        AND $tool IN ('', tool)
        AND ($device = '' OR run_id IN (
            SELECT run_id FROM batch JOIN measurement USING (batch_number)
            GROUP BY run_id HAVING bool_and(device = $device)
        ))
    ORDER BY started_at, run_id
"""
_DELETIONS = (
    """
    DELETE FROM measurement WHERE batch_number IN (
        SELECT batch_number FROM batch WHERE run_id IN (SELECT unnest($run_ids::VARCHAR[]))
    )
    """,
    "DELETE FROM batch WHERE run_id IN (SELECT unnest($run_ids::VARCHAR[]))",
    "DELETE FROM run WHERE run_id IN (SELECT unnest($run_ids::VARCHAR[]))",
)
# Those of rows deleted now, and of rows that a review judged while they were being deleted.
_DELETE_DOUBTS = "DELETE FROM doubt WHERE batch_number NOT IN (SELECT batch_number FROM batch)"


@dataclass(frozen=True, slots=True)
class _OldRun:
    run_id: str
    num_rows: int


def prune(store: Store, request: PruneRequest, now: datetime) -> PruneReport:
    """Delete runs whose last batch was recorded long enough ago, all or none of them.

    Runs that a snapshot selects a row of are kept. With a device, only runs that measured nothing
    else go. The catalog does not remember the content of what it deletes: who sends such a run
    again records it again.

    Raises:
        InvalidRequestError: the age is not a number of days from 0 to 36,500.

    """
    if not 0 <= request.older_than_days <= _MAX_DAYS:
        raise InvalidRequestError.of_field("older_than_days", f"must be from 0 to {_MAX_DAYS}")
    if request.is_dry_run:
        with store.cursor() as cursor:
            cursor.begin()
            return _plan(cursor, request, now)
    with store.transaction() as cursor:
        report = _plan(cursor, request, now)
        if report.deleted_run_ids:
            _delete(cursor, request, report, now)
    return report


def _plan(cursor: duckdb.DuckDBPyConnection, request: PruneRequest, now: datetime) -> PruneReport:
    """Return what is old enough, divided into what is needed and what is not."""
    unfinished_days = max(request.older_than_days, _UNFINISHED_DAYS)
    present = now.replace(tzinfo=None)
    rows = cursor.execute(
        _OLD_RUNS,
        {
            "limit": present - timedelta(days=request.older_than_days),
            "unfinished_limit": present - timedelta(days=unfinished_days),
            "tool": request.tool,
            "device": request.device,
        },
    ).fetchall()
    needed = runs_needed_by_snapshots(cursor) if rows else set()
    deleted = [_OldRun(*row) for row in rows if row[0] not in needed]
    kept = [_OldRun(*row) for row in rows if row[0] in needed]
    return PruneReport(
        deleted_run_ids=tuple(run.run_id for run in deleted),
        num_deleted_rows=sum(run.num_rows for run in deleted),
        kept_run_ids=tuple(run.run_id for run in kept),
        num_kept_rows=sum(run.num_rows for run in kept),
    )


def _delete(
    cursor: duckdb.DuckDBPyConnection, request: PruneRequest, report: PruneReport, now: datetime
) -> None:
    values = [
        next_moment(cursor),
        request.older_than_days,
        request.device,
        request.tool,
        len(report.deleted_run_ids),
        report.num_deleted_rows,
        now.replace(tzinfo=None),
    ]
    cursor.execute("INSERT INTO pruning VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    for deletion in _DELETIONS:
        cursor.execute(deletion, {"run_ids": list(report.deleted_run_ids)})
    cursor.execute(_DELETE_DOUBTS)
