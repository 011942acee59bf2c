"""Read other tools' tables strictly: every fault names the file and, where it can, the line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from foretoken.catalog.dims import Floats, Integers, Mask
from foretoken.catalog.sources.content import check_lines, check_utf8
from foretoken.catalog.sources.file import SourceFile, current_budget, refuse
from foretoken.domain.errors import InvalidRequestError

_EMPTY_CELLS = ["", "nan", "NaN", "NAN", "NA", "N/A", "null", "None"]
# Larger floats are not exact as integers.
WHOLE_MAX = 2.0**53
# The header is line 1.
_FIRST_LINE = 2
# Real tables have some dozen columns, real names some dozen characters.
_COLUMNS_MAX = 2_000
_TEXT_MAX = 1_000
# How much of a bad cell an error shows.
_SHOWN = 60
_CELL_BYTES = 8

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table in memory; its source keeps name and hash, not the bytes.

    `has_lines`: its rows are the lines of a file after a header.
    """

    source: SourceFile
    path: Path
    table: pa.Table
    has_lines: bool = True

    @property
    def num_rows(self) -> int:
        """Data rows in the file."""
        return int(self.table.num_rows)

    def has(self, column: str) -> bool:
        """Return whether the file has this column."""
        return column in self.table.schema.names

    def numbers(self, column: str) -> Floats:
        """Return a column of numbers, NaN where a cell is empty.

        Raises:
            InvalidRequestError: the column is missing or a cell is not a number.

        """
        cells = self._column(column)
        try:
            floats = cells.cast(pa.float64())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
            self._check_cells(column, cells.to_pylist(), _is_number, "not a number")
            raise self.fault(0, f"{column}: not numbers but {cells.type}") from err
        return np.asarray(pc.fill_null(floats, np.nan).to_numpy(), dtype=np.float64)

    def integers(self, column: str) -> Integers:
        """Return a column of whole numbers.

        Raises:
            InvalidRequestError: the column is missing, or a cell is empty or not whole.

        """
        numbers = self.numbers(column)
        is_whole = np.isfinite(numbers) & (np.floor(numbers) == numbers)
        is_whole &= np.abs(numbers) <= WHOLE_MAX
        if not is_whole.all():
            row = int(np.argmin(is_whole))
            raise self.fault(row, f"{column}: {numbers[row]} is not a whole number")
        return numbers.astype(np.int64)

    def texts(self, column: str) -> npt.NDArray[np.str_]:
        """Return a column as text, empty cells as the empty string.

        Raises:
            InvalidRequestError: the column is missing or a cell is too long.

        """
        words = self._words(column)
        # An array of text gives every cell the room of the longest.
        self._check_cells(column, words, lambda word: len(word) <= _TEXT_MAX, "too long")
        return np.array(words, dtype=str)

    def flags(self, column: str) -> Mask:
        """Return a column of true and false (or 1 and 0).

        Raises:
            InvalidRequestError: the column is missing or a cell is something else.

        """
        words = [word.lower() for word in self._words(column)]
        self._check_cells(column, words, _BOOLEANS.__contains__, "neither true nor false")
        return np.array([_BOOLEANS[word] for word in words], dtype=bool)

    def fault(self, row: int, description: str) -> InvalidRequestError:
        """Return the error for a row, counted from 0."""
        place = f"line {row + _FIRST_LINE}" if self.has_lines else f"row {row + 1}"
        return InvalidRequestError.of_field("path", f"{self.path}, {place}: {description}")

    def _check_cells(
        self, column: str, cells: Sequence[Any], is_legal: Callable[[Any], bool], fault: str
    ) -> None:
        for row, cell in enumerate(cells):
            if not is_legal(cell):
                shown = repr(cell[:_SHOWN] if isinstance(cell, str) else cell)
                raise self.fault(row, f"{column}: {shown} is {fault}")

    def _words(self, column: str) -> list[str]:
        cells = self._column(column).to_pylist()
        return ["" if cell is None else str(cell) for cell in cells]

    def _column(self, name: str) -> pa.ChunkedArray:
        if not self.has(name):
            raise InvalidRequestError.of_field("path", f"{self.path}: column {name!r} is missing")
        return self.table.column(name)


def parse_csv(source: SourceFile, path: Path, required: Sequence[str] = ()) -> SourceTable:
    """Return the table in a CSV file.

    Raises:
        InvalidRequestError: it is not a CSV file in UTF-8, has an endless line, too many columns or
            no rows, names a column twice, or lacks a required one.

    """
    check_utf8(source, path)
    check_lines(source, path)
    _check_header(source, path)
    options = csv.ConvertOptions(null_values=_EMPTY_CELLS, strings_can_be_null=True)
    try:
        table = csv.read_csv(pa.BufferReader(source.content), convert_options=options)
    except pa.ArrowInvalid as err:
        raise InvalidRequestError.of_field("path", f"{path}: not a CSV file: {err}") from err
    return _check_table(SourceTable(source, path, table), required)


def parse_parquet(source: SourceFile, path: Path, required: Sequence[str] = ()) -> SourceTable:
    """Return the table in a Parquet file.

    Raises:
        InvalidRequestError: it is not a Parquet file, unpacks to more than the import may read, has
            too many columns, nested columns, texts that are not UTF-8 or no rows, names a column
            twice, or lacks a required one.

    """
    try:
        file = parquet.ParquetFile(pa.BufferReader(source.content))
        _check_parquet(file, path)
        # A column of few distinct values stays as small as it is in the file.
        texts = [f.name for f in file.schema_arrow if _is_text(f.type)]
        file = parquet.ParquetFile(pa.BufferReader(source.content), read_dictionary=texts)
        table = file.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as err:
        refuse(path, f"not a Parquet file: {err}")
    for name, column in zip(table.schema.names, table.columns, strict=True):
        check_texts(column, name, path)
    return _check_table(SourceTable(source, path, table, has_lines=False), required)


def check_texts(column: pa.ChunkedArray, name: str, path: Path) -> None:
    """Check that the texts of a column of a Parquet file are UTF-8; nothing else looks at them.

    Raises:
        InvalidRequestError: they are not; names the column.

    """
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as err:
        refuse(path, f"column {name!r} cannot be read: {err}")


def _check_header(source: SourceFile, path: Path) -> None:
    content = source.content
    end = content.find(b"\n")
    num_columns = content.count(b",", 0, end if end >= 0 else len(content)) + 1
    if num_columns > _COLUMNS_MAX:
        refuse(path, f"{num_columns} columns, more than {_COLUMNS_MAX}")


def _check_parquet(file: parquet.ParquetFile, path: Path) -> None:
    """Refuse by its footer a file that claims more than the import may read."""
    about = file.metadata
    if about.num_columns > _COLUMNS_MAX:
        refuse(path, f"{about.num_columns} columns, more than {_COLUMNS_MAX}")
    for name, kind in zip(file.schema_arrow.names, file.schema_arrow.types, strict=True):
        if pa.types.is_nested(kind):
            refuse(path, f"column {name!r} is nested ({kind}), which is not read")
    groups = [about.row_group(index) for index in range(about.num_row_groups)]
    packed = sum(group.total_byte_size for group in groups)
    current_budget().spend(max(packed, about.num_rows * about.num_columns * _CELL_BYTES), path)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_table(found: SourceTable, required: Sequence[str]) -> SourceTable:
    """Return the table without the bytes it was read from."""
    names = found.table.schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        refuse(found.path, f"columns twice: {', '.join(repeated)}")
    if not found.num_rows:
        refuse(found.path, "has no rows; was it cut short? Remove it, or fetch it again")
    missing = [name for name in required if name not in names]
    if missing:
        refuse(found.path, f"missing columns {', '.join(missing)}")
    return replace(found, source=replace(found.source, content=b""))


def _is_number(cell: object) -> bool:
    if cell is None:
        return True
    try:
        float(str(cell))
    except ValueError:
        return False
    return True
