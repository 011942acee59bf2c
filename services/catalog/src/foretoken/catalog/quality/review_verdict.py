"""Compare what a review found with the flags there are, describe it, and write it down."""

from collections.abc import Sequence
from datetime import datetime

import duckdb
import pyarrow as pa

from foretoken.catalog.quality.review_row import READABLE, ReviewGroup
from foretoken.catalog.quality.stored_row import SUBJECT
from foretoken.domain.measurements.measurement import CheckRequest, QualityFinding, QualityReport

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
        ORDER BY num_flagged DESC, test, finding.operator, finding.device, finding.phase,
            finding.kernel
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
