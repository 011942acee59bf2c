"""The dimensions of measurement rows: checked against their operators, as columns, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
# A truth value per row.
Mask = npt.NDArray[np.bool_]


# Places of rows in a table.
Indices = Integers
Columns = Mapping[str, Integers]


@dataclass(frozen=True, slots=True)
class OperatorRows:
    """The rows of one operator in a table: their places, and their dimensions as columns."""

    spec: OperatorSpec
    indices: Indices
    columns: Columns


def columns_to_dims(columns: Mapping[str, Any], num_rows: int) -> pa.MapArray:
    """Return the `dims` column of rows that all have these dimensions, in this order."""
    names = list(columns)
    values = np.column_stack(
        [np.broadcast_to(np.asarray(columns[name], dtype=np.int64), num_rows) for name in names]
    )
    keys = pa.DictionaryArray.from_arrays(
        pa.array(np.tile(np.arange(len(names), dtype=np.int32), num_rows)), pa.array(names)
    ).cast(pa.string())
    offsets = np.arange(num_rows + 1, dtype=np.int32) * len(names)
    return pa.MapArray.from_arrays(pa.array(offsets), keys, pa.array(values.reshape(-1)))


# The table has this many columns for dimensions, `d0`, `d1`, ...
MAX_DIMS = 18
DIM_COLUMNS = tuple(f"d{place}" for place in range(MAX_DIMS))


def dims_to_places(groups: Sequence[OperatorRows], num_rows: int) -> dict[str, pa.Array]:
    """Return the dimensions of rows as columns by place, null beyond the operator's last."""
    columns = {}
    for place, name in enumerate(DIM_COLUMNS):
        values = np.zeros(num_rows, dtype=np.int64)
        is_null = np.ones(num_rows, dtype=bool)
        for group in groups:
            if place < len(group.spec.dims):
                values[group.indices] = group.columns[group.spec.dim_names[place]]
                is_null[group.indices] = False
        columns[name] = pa.array(values, mask=is_null)
    return columns


def places_to_dims(operators: pa.Array, columns: Mapping[str, pa.Array]) -> pa.MapArray:
    """Return the `dims` column of rows of these operators from their columns by place."""
    coded = operators.dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False)
    names = [find_operator(name).dim_names for name in coded.dictionary.to_pylist()]
    widths = np.array([len(found) for found in names], dtype=np.int64)[codes]
    offsets = np.concatenate([[0], np.cumsum(widths)])
    items = np.empty(int(offsets[-1]), dtype=np.int64)
    keys = np.empty(int(offsets[-1]), dtype=np.int32)
    known = sorted({name for found in names for name in found})
    for code, found in enumerate(names):
        rows = np.flatnonzero(codes == code)
        for place, name in enumerate(found):
            # Other operators' rows may be null here, and a number with nulls is read as a float.
            values = columns[DIM_COLUMNS[place]].fill_null(0).to_numpy(zero_copy_only=False)
            items[offsets[rows] + place] = values[rows]
            keys[offsets[rows] + place] = known.index(name)
    named = pa.DictionaryArray.from_arrays(pa.array(keys), pa.array(known, pa.string()))
    return pa.MapArray.from_arrays(
        pa.array(offsets.astype(np.int32)), named.cast(pa.string()), pa.array(items)
    )


def map_to_places(dims: pa.MapArray) -> dict[str, pa.Array]:
    """Return dimensions in canonical order as columns by place, null beyond a row's last."""
    offsets = dims.offsets.to_numpy().astype(np.int64)
    items = dims.items.to_numpy(zero_copy_only=False)
    firsts, widths = offsets[:-1], np.diff(offsets)
    columns = {}
    for place, name in enumerate(DIM_COLUMNS):
        has_place = widths > place
        values = np.zeros(len(dims), dtype=np.int64)
        values[has_place] = items[firsts[has_place] + place]
        columns[name] = pa.array(values, mask=~has_place)
    return columns


def split_by_operator(table: pa.Table) -> tuple[pa.Table, tuple[OperatorRows, ...]]:
    """Check the dimensions of every row; return the table with them in canonical order.

    Raises:
        InvalidRequestError: a row has other dimensions than its operator, or an illegal value;
            the message names the first such row, counted from 0.
        UnknownOperatorError: a row's operator does not exist.

    """
    if table.num_rows == 0:
        return table, ()
    view = _DimsView(table)
    operators = _combined(table.column("operator")).dictionary_encode()
    codes = operators.indices.to_numpy(zero_copy_only=False)
    groups = []
    for code, name in enumerate(operators.dictionary.to_pylist()):
        indices = np.flatnonzero(codes == code)
        groups.append(view.take(find_operator(name), indices))
    if view.is_canonical:
        return table, tuple(groups)
    position = table.schema.get_field_index("dims")
    field = table.schema.field("dims")
    return table.set_column(position, field, view.canonical(field.type)), tuple(groups)


class _DimsView:
    """The map column as flat arrays, rewritten in canonical order as operators are taken.

    `is_canonical` as long as there was nothing to rewrite.
    """

    def __init__(self, table: pa.Table) -> None:
        self.is_canonical = True
        dims = _combined(table.column("dims"))
        offsets = dims.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        self._offsets = offsets - first
        keys = dims.keys.slice(first, last - first).dictionary_encode()
        items = dims.items.slice(first, last - first)
        if items.null_count:
            empty = int(np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))[0])
            row = int(np.searchsorted(self._offsets, empty, side="right")) - 1
            raise InvalidRequestError.of_field("dims", f"row {row}: a dimension has no value")
        self._names: list[str] = keys.dictionary.to_pylist()
        self._codes = keys.indices.to_numpy(zero_copy_only=False).copy()
        self._items = items.to_numpy(zero_copy_only=False).copy()

    def take(self, spec: OperatorSpec, indices: Indices) -> OperatorRows:
        """Return an operator's rows, checked; put their dimensions in canonical order."""
        width = len(spec.dim_names)
        starts = self._offsets[indices]
        has_width = self._offsets[indices + 1] - starts == width
        if not has_width.all():
            self._refuse(spec, int(indices[np.argmin(has_width)]))
        places = starts[:, None] + np.arange(width)
        codes, items = self._codes[places], self._items[places]
        wanted = np.array([self._code_of(name) for name in spec.dim_names])
        if (codes != wanted).any():
            is_dim = [codes == code for code in wanted]
            for is_here in is_dim:
                has_one = is_here.sum(axis=1) == 1
                if not has_one.all():
                    self._refuse(spec, int(indices[np.argmin(has_one)]))
            items = np.column_stack([items[is_here] for is_here in is_dim])
            self._codes[places], self._items[places] = wanted, items
            self.is_canonical = False
        for dim, column in zip(spec.dims, items.T, strict=True):
            if (column < dim.minimum).any():
                self._refuse(spec, int(indices[np.argmax(column < dim.minimum)]))
        columns = dict(zip(spec.dim_names, np.ascontiguousarray(items.T), strict=True))
        return OperatorRows(spec, indices, columns)

    def canonical(self, kind: pa.DataType) -> pa.MapArray:
        """Return the column with every row's dimensions in the order taken."""
        keys = pa.DictionaryArray.from_arrays(pa.array(self._codes), pa.array(self._names))
        offsets = pa.array(self._offsets.astype(np.int32))
        dims = pa.MapArray.from_arrays(offsets, keys.cast(pa.string()), pa.array(self._items))
        return dims.cast(kind)

    def _code_of(self, name: str) -> int:
        return self._names.index(name) if name in self._names else -1

    def _refuse(self, spec: OperatorSpec, row: int) -> None:
        span = slice(int(self._offsets[row]), int(self._offsets[row + 1]))
        names = [self._names[code] for code in self._codes[span]]
        if len(set(names)) < len(names):
            raise InvalidRequestError.of_field("dims", f"row {row}: a dimension is named twice")
        try:
            spec.check_dims(dict(zip(names, self._items[span].tolist(), strict=True)))
        except InvalidRequestError as err:
            raise InvalidRequestError(f"row {row}: {err.message}", err.violations) from err


def _combined(column: pa.ChunkedArray) -> Any:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return pa.concat_arrays(combined.chunks)
    return combined


def group_rows(codes: Sequence[npt.NDArray[Any]]) -> tuple[Indices, Indices]:
    """Sort rows by several columns at once, the last one fastest.

    Returns the order, and the position in it where each group of equal rows starts.
    """
    order = np.lexsort(tuple(reversed(codes)))
    is_new = np.zeros(len(order), dtype=bool)
    is_new[:1] = True
    for column in codes:
        ordered = column[order]
        is_new[1:] |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(is_new)
