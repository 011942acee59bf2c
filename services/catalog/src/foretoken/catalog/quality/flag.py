"""Flags of rows on their way into a table, each as a small integer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.dims import Indices, Mask

_INT8_MAX, _INT16_MAX = np.iinfo(np.int8).max, np.iinfo(np.int16).max


@dataclass(frozen=True, slots=True)
class Coded:
    """A column: every row's code, and the value of each code."""

    codes: npt.NDArray[np.signedinteger[Any]]
    values: tuple[str | None, ...]

    def is_value(self, value: str) -> Mask:
        """Return which rows have this value."""
        if value not in self.values:
            return np.zeros(len(self.codes), dtype=bool)
        if len(self.values) == 1:
            return np.ones(len(self.codes), dtype=bool)
        is_value: Mask = self.codes == self.values.index(value)
        return is_value


def code_columns(table: pa.Table, names: Iterable[str]) -> dict[str, Coded]:
    """Return text columns of a table coded; null is a value like any other."""
    return {name: code_column(table.column(name)) for name in names}


def code_column(column: pa.ChunkedArray) -> Coded:
    """Return one text column coded."""
    if column.null_count == len(column):
        return Coded(np.zeros(len(column), dtype=np.int8), (None,))
    coded = column.dictionary_encode().combine_chunks()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.unify_dictionaries().combine_chunks()
    values = coded.dictionary.to_pylist()
    codes = narrow_codes(coded.indices.fill_null(len(values)).to_numpy(), len(values) + 1)
    return Coded(codes, (*values, None) if coded.null_count else tuple(values))


def narrow_codes(
    codes: npt.NDArray[np.signedinteger[Any]], num_values: int
) -> npt.NDArray[np.signedinteger[Any]]:
    """Return codes of so many values in few bytes: a review has nine columns of a million rows."""
    return codes.astype(np.int8 if num_values <= _INT8_MAX else np.int32)


def split_by_code(
    columns: Sequence[Coded], rows: Indices
) -> Iterator[tuple[Indices, tuple[str | None, ...]]]:
    """Yield places in `rows` of equal rows, ascending, and the values they share."""
    if not len(rows):
        return
    varying = [column for column in columns if len(column.values) > 1]
    key = np.zeros(len(rows), dtype=np.int64)
    size = 1
    for column in varying:
        size *= len(column.values)
        key = key * len(column.values) + column.codes[rows]
    if size == 1:
        starts, order = np.zeros(1, dtype=np.int64), np.arange(len(rows))
    else:
        narrow = key.astype(np.int16) if size <= _INT16_MAX else key  # 16 bits sort by radix
        order = np.argsort(narrow, kind="stable")
        ordered = key[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        places = order[start:stop]
        row = rows[places[0]]
        yield places, tuple(column.values[column.codes[row]] for column in columns)


class RowFlags:
    """New flags by row; written behind those the rows have already."""

    def __init__(self) -> None:
        self._found: dict[int, list[str]] = {}

    def add(self, row: int, flag: str) -> None:
        """Flag a row: `name: explanation`."""
        self._found.setdefault(row, []).append(flag)

    def write_into(self, table: pa.Table) -> tuple[pa.Table, int]:
        """Return the table with the flags in it, and how many rows have any."""
        import pyarrow.compute as pc  # takes long to load

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
    import pyarrow.compute as pc  # takes long to load

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
