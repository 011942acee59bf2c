"""Flags of rows on their way into a table."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class RowFlags:
    """New flags by row; written behind those the rows have already."""

    def __init__(self) -> None:
        self._found: dict[int, list[str]] = {}

    def add(self, row: int, flag: str) -> None:
        """Flag a row: `name: explanation`."""
        self._found.setdefault(row, []).append(flag)

    def write_into(self, table: pa.Table) -> tuple[pa.Table, int]:
        """Return the table with the flags in it, and how many rows have any."""
        given = table.column("flags")
        if not self._found:
            return table, _count_flagged(given)
        rows = np.array(sorted(self._found))
        lists = [self._found[row] for row in rows.tolist()]
        if given.null_count < len(given):
            flagged = np.flatnonzero(pc.fill_null(pc.list_value_length(given), 0).to_numpy())
            for row in flagged.tolist():
                # A row that was judged before brings what is found again.
                self._found[row] = list(
                    dict.fromkeys([*given[row].as_py(), *self._found.get(row, [])])
                )
            rows = np.array(sorted(self._found))
            lists = [self._found[row] for row in rows.tolist()]
        column = _scatter(rows, lists, table.num_rows)
        position = table.schema.get_field_index("flags")
        return table.set_column(position, table.schema.field("flags"), column), len(rows)


def _count_flagged(column: pa.ChunkedArray) -> int:
    if column.null_count == len(column):
        return 0
    return int(pc.sum(pc.greater(pc.list_value_length(column), 0)).as_py() or 0)


def _scatter(rows: np.ndarray, lists: list[list[str]], num_rows: int) -> pa.Array:
    """Return a list column that is null but in some rows, which ascend."""
    lengths = np.zeros(num_rows + 1, dtype=np.int32)
    lengths[rows + 1] = [len(found) for found in lists]
    is_null = np.ones(num_rows, dtype=bool)
    is_null[rows] = False
    values = pa.array([flag for found in lists for flag in found], pa.string())
    offsets = pa.array(np.cumsum(lengths, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(is_null))
