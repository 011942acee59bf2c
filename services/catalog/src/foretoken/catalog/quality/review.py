"""Judge stored rows against each other, compare with the flags there are, and write it down.

Rows never change: a review records what it flags apart from them, from its own moment on, and ends
earlier flags that no longer hold. Snapshots keep the flags of their moment.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.quality.phase_ratio import phase_ratio
from foretoken.catalog.quality.stored_row import (
    READABLE,
    SUBJECT,
    ReviewGroup,
    StoredRows,
    find_groups,
    find_groups_of_runs,
    groups_with_backward,
    load_rows,
)
from foretoken.catalog.quality.test_definition import Judges, all_tests
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.measurements.measurement import CheckRequest, QualityFinding, QualityReport
from foretoken.domain.operators.spec.operator import find_operator

FOUND_SCHEMA = pa.schema(
    [
        pa.field("batch_number", pa.int64()),
        pa.field("row_index", pa.int64()),
        pa.field("flag", pa.string()),
    ]
)
_DESCRIBED = (*SUBJECT, "status", "source_file", "coalesce(flags, []) AS flags")
_GROUP_SCHEMA = pa.schema([pa.field("operator", pa.string()), pa.field("device", pa.string())])
# A flag is the same as an earlier one of the same test about the same row, however explained.
_TEST = "split_part(flag, ':', 1)"


def register_verdict(
    cursor: duckdb.DuckDBPyConnection,
    groups: Sequence[ReviewGroup],
    found: pa.Table,
    judged_run: str,
    columns: Sequence[str] = _DESCRIBED,
) -> None:
    """Lay out, for this cursor alone, which rows were judged and which flags begin and end.

    `columns` of the rows are laid out too: those that `describe` needs, or none.
    """
    scope = [{"operator": group.operator, "device": group.device} for group in groups]
    cursor.register("found_now", found)
    cursor.register("groups_now", pa.Table.from_pylist(scope, schema=_GROUP_SCHEMA))
    of_run = "WHERE run_id = ?" if judged_run else ""
    cursor.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE judged AS
        SELECT {", ".join(("batch_number", "row_index", *columns))}
        FROM ({READABLE}) SEMI JOIN groups_now USING (operator, device) {of_run}
        """,  # noqa: S608 - values are bound
        [judged_run] if judged_run else [],
    )
    for statement in _COMPARISON:
        cursor.execute(statement)
    cursor.unregister("found_now")
    cursor.unregister("groups_now")


# Rows may have been deleted since they were read, and other reviews may have ended meanwhile.
_COMPARISON = (
    f"""
    CREATE OR REPLACE TEMP TABLE standing AS
    SELECT batch_number, row_index, flag, {_TEST} AS test
    FROM doubt SEMI JOIN judged USING (batch_number, row_index) WHERE until IS NULL
    """,  # noqa: S608
    f"""
    CREATE OR REPLACE TEMP TABLE doubted AS
    SELECT found.*, standing.flag IS NULL AS is_new
    FROM (
        SELECT batch_number, row_index, flag, {_TEST} AS test
        FROM found_now SEMI JOIN judged USING (batch_number, row_index)
    ) AS found
    LEFT JOIN standing USING (batch_number, row_index, test)
    """,  # noqa: S608
    """
    CREATE OR REPLACE TEMP TABLE withdrawn AS
    SELECT * FROM standing ANTI JOIN doubted USING (batch_number, row_index, test)
    """,
)


def write_flags(cursor: duckdb.DuckDBPyConnection, number: int) -> int:
    """Write the flags that begin with a review and the end of those that do not hold.

    Returns how many rows were judged.
    """
    cursor.execute(
        """
        UPDATE doubt SET until = ? FROM withdrawn
        WHERE doubt.until IS NULL AND doubt.batch_number = withdrawn.batch_number
            AND doubt.row_index = withdrawn.row_index AND doubt.flag = withdrawn.flag
        """,
        [number],
    )
    cursor.execute(
        """
        INSERT INTO doubt
        SELECT batch_number, row_index, flag, ?, NULL FROM doubted WHERE is_new
        """,
        [number],
    )
    ((num_rows,),) = cursor.execute("SELECT count(*) FROM judged").fetchall()
    return int(num_rows)


def write_review(
    cursor: duckdb.DuckDBPyConnection,
    requests: Sequence[CheckRequest],
    number: int,
    num_rows: int,
    now: datetime,
) -> None:
    """Write that a review took place; one may answer several requests, of at least one."""
    for request in requests:
        values = [number, request.operator, request.device, request.run_id, num_rows]
        cursor.execute(
            "INSERT INTO review SELECT ?, ?, ?, ?, ?, ?", [*values, now.replace(tzinfo=None)]
        )


def describe(cursor: duckdb.DuckDBPyConnection) -> QualityReport:
    """Return what the verdict says, the findings with most rows first."""
    counts = cursor.execute(
        """
        SELECT
            count(*),
            count(*) FILTER (status = 'failed'),
            count(*) FILTER (len(flags) > 0 OR doubted.batch_number IS NOT NULL),
            count(*) FILTER (doubted.is_new)
        FROM judged
        LEFT JOIN (
            SELECT batch_number, row_index, bool_or(is_new) AS is_new FROM doubted GROUP BY ALL
        ) AS doubted USING (batch_number, row_index)
        """
    ).fetchone()
    num_rows, num_failed, num_flagged, num_new = counts or (0, 0, 0, 0)
    withdrawn = cursor.execute(
        """
        SELECT count(DISTINCT (batch_number, row_index))
        FROM withdrawn ANTI JOIN doubted USING (batch_number, row_index)
        """
    ).fetchone()
    return QualityReport(
        num_rows=num_rows,
        num_failed=num_failed,
        num_flagged=num_flagged,
        num_new=num_new,
        num_withdrawn=withdrawn[0] if withdrawn else 0,
        findings=_findings(cursor),
    )


def _findings(cursor: duckdb.DuckDBPyConnection) -> tuple[QualityFinding, ...]:
    subject = ", ".join(SUBJECT)
    same = " AND ".join(f"finding.{name} IS NOT DISTINCT FROM total.{name}" for name in SUBJECT)
    rows = cursor.execute(
        f"""
        WITH flagged AS (
            SELECT batch_number, row_index, flag, test, is_new FROM doubted
            UNION ALL
            SELECT batch_number, row_index, flag, {_TEST}, false
            FROM (SELECT batch_number, row_index, unnest(flags) AS flag FROM judged)
        ), total AS (
            SELECT {subject}, count(*) AS num_rows FROM judged GROUP BY ALL
        ), finding AS (
            SELECT test, {subject}, count(*) AS num_flagged, count(*) FILTER (is_new) AS num_new,
                arg_min(flag, (batch_number, row_index)) AS example, mode(source_file) AS source
            FROM flagged JOIN judged USING (batch_number, row_index)
            GROUP BY ALL
        )
        SELECT test, {", ".join(f"finding.{name}" for name in SUBJECT)}, num_rows, num_flagged,
            num_new, example, source
        FROM finding
        JOIN total ON {same}
        """  # noqa: S608 - names from our own code
    ).fetchall()
    return tuple(
        QualityFinding(
            test=row[0],
            operator=row[1],
            device=row[2],
            topology=row[3] or "",
            phase=row[4],
            framework=row[5] or "",
            kernel=row[6] or "",
            num_rows=row[7],
            num_flagged=row[8],
            num_new=row[9],
            example=row[10].partition(": ")[2] or row[10],
            source_file=row[11] or "",
        )
        for row in rows
    )


# Called with how far the work is, from 0 to 1, and what is being judged.
Listener = Callable[[float, str], None]


def _no_listener(_ratio: float, _message: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReview:
    """Which runs were judged when they were complete, and how many rows have flags since."""

    run_ids: tuple[str, ...]
    num_flagged: int


def review_runs(
    store: Store, run_ids: Sequence[str], now: datetime, listener: Listener = _no_listener
) -> RunReview:
    """Judge runs that are complete, and the rows of other runs with them, all at once."""
    with store.cursor() as cursor:
        groups = find_groups_of_runs(cursor, run_ids)
        found = _judge_groups(cursor, groups, "", listener)
    listener(1.0, "writing")
    requests = [CheckRequest(run_id=run_id) for run_id in run_ids]
    with store.transaction() as cursor:
        number, num_rows = next_moment(cursor), 0
        for part in _split_by_device(groups):
            register_verdict(cursor, part, found, "", columns=())
            num_rows += write_flags(cursor, number)
        write_review(cursor, requests, number, num_rows, now)
    return RunReview(run_ids=tuple(run_ids), num_flagged=num_rows)


def review(
    store: Store,
    request: CheckRequest,
    now: datetime,
    listener: Listener = _no_listener,
) -> QualityReport:
    """Judge the selected rows against all rows of the same operators and devices.

    An error that the listener raises ends the review before anything is written. A dry run writes
    nothing and reports the same.
    """
    start_s = time.perf_counter()
    with store.cursor() as cursor:
        groups = find_groups(cursor, request)
        found = _judge_groups(cursor, groups, request.run_id, listener)
    listener(1.0, "writing")
    reports = []
    with store.transaction() as cursor:
        number, num_rows = next_moment(cursor), 0
        for part in _split_by_device(groups):
            register_verdict(cursor, part, found, request.run_id)
            reports.append(describe(cursor))
            if not request.is_dry_run:
                num_rows += write_flags(cursor, number)
        if not request.is_dry_run:
            write_review(cursor, [request], number, num_rows, now)
    return replace(_join(reports), wall_s=time.perf_counter() - start_s)


def _split_by_device(groups: Sequence[ReviewGroup]) -> Iterator[Sequence[ReviewGroup]]:
    """Yield the groups of one device after another: what is laid out at a time is bounded."""
    for device in sorted({group.device for group in groups}):
        yield [group for group in groups if group.device == device]


def _join(reports: Sequence[QualityReport]) -> QualityReport:
    """Return the reports of different rows as one, the findings with most rows first."""
    findings = [finding for report in reports for finding in report.findings]
    totals = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("num_rows", "num_failed", "num_flagged", "num_new", "num_withdrawn")
    }
    return QualityReport(**totals, findings=tuple(sorted(findings, key=_rank)))


def _rank(finding: QualityFinding) -> tuple[object, ...]:
    where = (finding.test, finding.operator, finding.device, finding.phase, finding.kernel)
    return (-finding.num_flagged, *where)


def _judge_groups(
    cursor: duckdb.DuckDBPyConnection,
    groups: Sequence[ReviewGroup],
    judged_run: str,
    listener: Listener,
) -> pa.Table:
    """Return the flags about all groups, read one after the other."""
    pieces = [FOUND_SCHEMA.empty_table()]
    peers: dict[str, Mapping[str, float]] = {}
    num_done, num_rows = 0, max(sum(group.num_rows for group in groups), 1)
    for group in groups:
        listener(num_done / num_rows, f"{group.operator} on {group.device}")
        if group.operator not in peers:
            peers[group.operator] = _phase_ratios(cursor, group.operator)
        loaded = load_rows(cursor, group, peers[group.operator])
        flags = find_flags(loaded.rows)
        is_judged = loaded.is_of_run(judged_run)
        flagged = np.array([place for place in flags if is_judged[place]], dtype=np.int64)
        counts = [len(flags[place]) for place in flagged.tolist()]
        rows = np.repeat(flagged, counts)
        pieces.append(
            pa.table(
                {
                    "batch_number": loaded.batch_numbers[rows],
                    "row_index": loaded.row_indices[rows],
                    "flag": [flag for place in flagged.tolist() for flag in flags[place]],
                },
                schema=FOUND_SCHEMA,
            )
        )
        num_done += group.num_rows
    return pa.concat_tables(pieces)


def find_flags(rows: StoredRows) -> dict[int, list[str]]:
    """Return the flags of rows, by their place, ascending.

    Rows of flagged tables are no neighbours of others. Impossible rows have their flag already.
    """
    flags: dict[int, list[str]] = {}
    judged = np.arange(len(rows))
    for kind in Judges:
        subject = rows.take(judged) if len(judged) < len(rows) else rows
        for test in all_tests():
            if test.judges is kind and len(subject):
                for flagged_rows in test.find(subject):
                    for index, place in enumerate(judged[flagged_rows.places].tolist()):
                        flag = f"{test.name}: {flagged_rows.explain(index)}"
                        flags.setdefault(place, []).append(flag)
        is_sound = ~rows.is_impossible
        is_sound[list(flags)] = False
        judged = np.flatnonzero(is_sound)
    return {place: flags[place] for place in sorted(flags) if not rows.is_impossible[place]}


def _phase_ratios(cursor: duckdb.DuckDBPyConnection, operator: str) -> Mapping[str, float]:
    """Return by device how much longer the backward pass takes, where both were measured."""
    if not find_operator(operator).backward_work_ratio:
        return {}
    groups = groups_with_backward(cursor, operator)
    ratios = {group.device: phase_ratio(load_rows(cursor, group, {}).rows) for group in groups}
    return {device: ratio for device, ratio in ratios.items() if ratio is not None}
