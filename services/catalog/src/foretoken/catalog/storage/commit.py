"""Write transactions, numbered: what a catalog must hold to hold all it acknowledged."""

from dataclasses import dataclass

import duckdb


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a transaction records; `newest_batch` and `recorded_at` (ISO 8601, UTC) of its last."""

    num_batches: int = 0
    num_rows: int = 0
    newest_batch: str = ""
    recorded_at: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A write transaction: its number, and what was recorded up to it.

    Counts never fall, whatever is pruned: two commits differ by what was recorded between them.
    They leave out what an older Foretoken had pruned. The newest batch is described in words.
    """

    number: int = 0
    num_batches: int = 0
    num_rows: int = 0
    newest_batch: str = ""
    recorded_at: str = ""

    def followed_by(self, recorded: Recorded) -> "Commit":
        """Return the next commit."""
        return Commit(
            number=self.number + 1,
            num_batches=self.num_batches + recorded.num_batches,
            num_rows=self.num_rows + recorded.num_rows,
            newest_batch=recorded.newest_batch or self.newest_batch,
            recorded_at=recorded.recorded_at or self.recorded_at,
        )


def insert_commit(cursor: duckdb.DuckDBPyConnection, commit: Commit) -> None:
    """Write a commit, as part of its own transaction."""
    cursor.execute(
        "INSERT INTO write_commit VALUES (?, ?, ?, ?, ?)",
        [
            commit.number,
            commit.num_batches,
            commit.num_rows,
            commit.newest_batch,
            commit.recorded_at,
        ],
    )


def read_newest_commit(cursor: duckdb.DuckDBPyConnection, database: str = "store") -> Commit:
    """Return the newest commit of an attached catalog; the zeroth where none is numbered yet."""
    tables = cursor.execute(
        "SELECT count(*) FROM duckdb_tables()"
        " WHERE database_name = ? AND table_name = 'write_commit'",
        [database],
    ).fetchall()
    if tables == [(0,)]:
        return Commit()
    rows = cursor.execute(
        "SELECT commit_number, num_batches, num_rows, newest_batch, recorded_at"  # noqa: S608 - a name of ours
        f" FROM {database}.write_commit ORDER BY commit_number DESC LIMIT 1"
    ).fetchall()
    if not rows:
        return Commit()
    number, num_batches, num_rows, newest_batch, recorded_at = rows[0]
    return Commit(
        number=number,
        num_batches=num_batches,
        num_rows=num_rows,
        newest_batch=newest_batch,
        recorded_at=recorded_at,
    )
