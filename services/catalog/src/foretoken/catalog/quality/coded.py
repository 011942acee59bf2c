"""Text columns as small integers, so that rows can be grouped without touching text again."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.array import Mask
from foretoken.catalog.dims import Indices

_INT16_MAX = np.iinfo(np.int16).max


@dataclass(frozen=True, slots=True)
class Coded:
    """A column: every row's code, and the value of each code."""

    codes: npt.NDArray[np.int32]
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
        return Coded(np.zeros(len(column), dtype=np.int32), (None,))
    coded = column.dictionary_encode(null_encoding="encode").combine_chunks()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.unify_dictionaries().combine_chunks()
    return Coded(coded.indices.to_numpy(), tuple(coded.dictionary.to_pylist()))


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
