"""Stream stored rows as they were at a moment, in the order they were recorded.

The database scans one table and keeps its order; what lies in other tables (where a row came from,
what was flagged later) is put in here, so that no join can reorder millions of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Indices
from foretoken.catalog.reading.content import CONTENT_COLUMNS
from foretoken.catalog.reading.selection import (
    PinnedFilter,
    VisibleBatches,
    find_row_condition,
)

# Rows of a piece: a row group of the database is 122,880.
_PIECE_ROWS = 100_000
# A row is known by its batch in the upper bits of a number and its place there in the lower.
_PLACE_BITS = 32


def scan_rows(
    cursor: duckdb.DuckDBPyConnection,
    pinned: PinnedFilter,
    columns: Sequence[str],
    batches: VisibleBatches,
) -> Iterator[pa.RecordBatch]:
    """Yield the selected rows of batches that the filter may see.

    They have the number of the batch, their place in it, the flags as of then, and `columns` of
    the table `measurement`. The cursor is taken until the end; in a transaction of its own it sees
    the catalog as it was at the start.
    """
    if not len(batches.numbers):
        return
    later_flags = _find_later_flags(cursor, pinned, batches)
    condition, values = find_row_condition(pinned.selection)
    names = ", ".join(("batch_number", "row_index", "flags", *columns))
    query = (
        f"SELECT {names} FROM measurement "  # noqa: S608 - values are bound
        f"WHERE {batches.find_condition()} AND {condition}"
    )
    relation = cursor.sql(query, params=values)
    for piece in relation.to_arrow_reader(_PIECE_ROWS):
        rows = later_flags.add_to(_keep(piece, batches), pinned.selection.include_flagged)
        if rows.num_rows:
            yield rows


def scan_content(
    cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter, batches: VisibleBatches
) -> Iterator[pa.RecordBatch]:
    """Yield what the selected rows say, without where they came from: `CONTENT_COLUMNS`."""
    columns = [name for name in CONTENT_COLUMNS if name != "flags"]
    yield from scan_rows(cursor, pinned, columns, batches)


def locate_batches(rows: pa.RecordBatch, batches: VisibleBatches) -> pa.Array:
    """Return the place of each row's batch among the visible ones."""
    numbers = rows.column("batch_number").to_numpy()
    return pa.array(np.searchsorted(batches.numbers, numbers))


@dataclass(frozen=True, slots=True)
class _LaterFlags:
    """Rows that reviews flagged at some moment, by number, and the flags they gave each.

    Where flagged rows are left out nobody looks at the flags: there are none.
    """

    keys: Indices
    flags: pa.Array

    def add_to(self, rows: pa.RecordBatch, include_flagged: bool) -> pa.RecordBatch:
        """Return rows with these flags after their own, or without the flagged rows."""
        if not len(self.keys):
            return rows
        keys = _number_rows(rows.column("batch_number"), rows.column("row_index"))
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_flagged = self.keys[places] == keys
        if not is_flagged.any():
            return rows
        if not include_flagged:
            return rows.filter(pa.array(~is_flagged))
        flagged = np.flatnonzero(is_flagged)
        flags = rows.column("flags")
        own = flags.take(pa.array(flagged)).to_pylist()
        later = self.flags.take(pa.array(places[flagged])).to_pylist()
        joined = [[*(first or ()), *last] for first, last in zip(own, later, strict=True)]
        order = np.arange(rows.num_rows)
        order[flagged] = rows.num_rows + np.arange(len(flagged))
        all_flags = pa.concat_arrays([flags, pa.array(joined, flags.type)])
        position = rows.schema.get_field_index("flags")
        return rows.set_column(position, "flags", all_flags.take(pa.array(order)))


def _find_later_flags(
    cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter, batches: VisibleBatches
) -> _LaterFlags:
    """Return the flags there were about rows of these batches at a moment."""
    # Lists of flags take ten times as long as all the rest.
    flags = ", list(flag ORDER BY since, flag) AS flags" if pinned.selection.include_flagged else ""
    query = f"""
        SELECT batch_number, row_index{flags} FROM doubt
        WHERE batch_number BETWEEN $first AND $last
            AND since <= $as_of AND coalesce(until > $as_of, true)
        GROUP BY batch_number, row_index ORDER BY batch_number, row_index
    """  # noqa: S608 - of our own
    first, last = int(batches.numbers[0]), int(batches.numbers[-1])
    parameters = {"first": first, "last": last, "as_of": pinned.as_of}
    found = cursor.sql(query, params=parameters).to_arrow_table()
    keys = _number_rows(found.column("batch_number"), found.column("row_index"))
    chunks = found.column("flags").chunks if flags else ()
    return _LaterFlags(keys, pa.concat_arrays(chunks) if chunks else pa.array([]))


def _keep(rows: pa.RecordBatch, batches: VisibleBatches) -> pa.RecordBatch:
    numbers = rows.column("batch_number").to_numpy()
    places = np.minimum(np.searchsorted(batches.numbers, numbers), len(batches.numbers) - 1)
    is_visible = batches.numbers[places] == numbers
    return rows if is_visible.all() else rows.filter(pa.array(is_visible))


def _number_rows(batch_numbers: pa.Array, row_indices: pa.Array) -> Indices:
    numbers = batch_numbers.to_numpy().astype(np.int64)
    found: Indices = (numbers << _PLACE_BITS) + row_indices.to_numpy()
    return found
