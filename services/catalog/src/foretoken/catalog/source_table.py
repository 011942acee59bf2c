"""Read other tools' CSV files strictly: every fault names the file and, where it can, the line."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from foretoken.catalog.dims import columns_to_dims
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operator import find_operator
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

_LFS_POINTER = b"version https://git-lfs"
_EMPTY_CELLS = ["", "nan", "NaN", "NAN", "NA", "N/A", "null", "None"]
# Larger floats are not exact as integers.
_WHOLE_MAX = 2.0**53
# The header is line 1.
_FIRST_LINE = 2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was read: its path relative to the import, and the SHA-256 of its bytes."""

    name: str
    content_hash: str
    content: bytes


def read_source_file(path: Path, root: Path) -> SourceFile:
    """Read a file that lies under `root`.

    Raises:
        InvalidRequestError: it cannot be read, or is a Git LFS pointer instead of the data.

    """
    name = path.relative_to(root).as_posix() if path != root else path.name
    try:
        content = path.read_bytes()
    except OSError as err:
        raise InvalidRequestError.of_field("path", f"{path}: {err.strerror}") from err
    if content.startswith(_LFS_POINTER):
        raise InvalidRequestError.of_field(
            "path",
            f"{path} is a Git LFS pointer, not the data; run `git lfs pull` where it is from",
        )
    return SourceFile(name, hashlib.sha256(content).hexdigest(), content)


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A CSV file in memory."""

    source: SourceFile
    path: Path
    table: pa.Table

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
        except pa.ArrowInvalid as err:
            texts = cells.to_pylist()
            row = next(
                i for i, text in enumerate(texts) if text is not None and not _is_number(text)
            )
            raise self.fault(row, f"{column}: {texts[row]!r} is not a number") from err
        return np.asarray(pc.fill_null(floats, np.nan).to_numpy(), dtype=np.float64)

    def integers(self, column: str) -> npt.NDArray[np.int64]:
        """Return a column of whole numbers.

        Raises:
            InvalidRequestError: the column is missing, or a cell is empty or not whole.

        """
        numbers = self.numbers(column)
        is_whole = np.isfinite(numbers) & (np.floor(numbers) == numbers)
        is_whole &= np.abs(numbers) <= _WHOLE_MAX
        if not is_whole.all():
            row = int(np.argmin(is_whole))
            raise self.fault(row, f"{column}: {numbers[row]} is not a whole number")
        return numbers.astype(np.int64)

    def texts(self, column: str) -> npt.NDArray[np.str_]:
        """Return a column as text, empty cells as the empty string."""
        return np.array([str(cell or "") for cell in self._column(column).to_pylist()], dtype=str)

    def flags(self, column: str) -> npt.NDArray[np.bool_]:
        """Return a column of true and false (or 1 and 0).

        Raises:
            InvalidRequestError: the column is missing or a cell is something else.

        """
        words = self._column(column).to_pylist()
        for row, word in enumerate(words):
            if str(word).lower() not in _BOOLEANS:
                raise self.fault(row, f"{column}: {word!r} is neither true nor false")
        return np.array([_BOOLEANS[str(word).lower()] for word in words], dtype=bool)

    def fault(self, row: int, description: str) -> InvalidRequestError:
        """Return the error for a row, counted from 0."""
        line = f"{self.path}, line {row + _FIRST_LINE}"
        return InvalidRequestError.of_field("path", f"{line}: {description}")

    def _column(self, name: str) -> pa.ChunkedArray:
        if not self.has(name):
            raise InvalidRequestError.of_field("path", f"{self.path}: column {name!r} is missing")
        return self.table.column(name)


_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def parse_csv(source: SourceFile, path: Path, required: Sequence[str] = ()) -> SourceTable:
    """Return the table in a CSV file.

    Raises:
        InvalidRequestError: it is not a CSV file, has no rows or names a column twice, or lacks a
            required one.

    """
    options = csv.ConvertOptions(null_values=_EMPTY_CELLS, strings_can_be_null=True)
    try:
        table = csv.read_csv(pa.BufferReader(source.content), convert_options=options)
    except (pa.ArrowInvalid, UnicodeDecodeError) as err:
        raise InvalidRequestError.of_field("path", f"{path}: not a CSV file: {err}") from err
    names = table.schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidRequestError.of_field("path", f"{path}: columns twice: {', '.join(repeated)}")
    if not table.num_rows:
        raise InvalidRequestError.of_field(
            "path", f"{path}: has no rows; was it cut short? Remove it, or fetch it again"
        )
    missing = [name for name in required if name not in names]
    if missing:
        raise InvalidRequestError.of_field("path", f"{path}: missing columns {', '.join(missing)}")
    return SourceTable(source, path, table)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """What rows taken from one source have in common; `flag` doubts them all."""

    operator: str
    dtype: str
    device: str
    topology: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    kernel: str | None = None
    num_samples: int | None = None
    flag: str = ""


def build_rows(
    facts: RowFacts,
    origin: SourceTable,
    rows: npt.NDArray[np.int64],
    dims: Mapping[str, Any],
    latency_us: Mapping[str, Floats],
) -> pa.Table:
    """Return measurement rows for the given rows of a source, counted from 0.

    `dims` and `latency_us` (by statistic, `median` always) hold a value per row taken. A row
    whose median is empty or not a number is a failed row that says so.

    Raises:
        InvalidRequestError: a dimension is smaller than the operator's least; names the line.

    """
    num_rows = len(rows)
    _check_dims(facts.operator, origin, rows, dims)
    median = latency_us["median"]
    is_number = np.isfinite(median)
    columns: dict[str, Any] = {
        name: pa.array(np.repeat(getattr(facts, name), num_rows).tolist(), pa.string())
        for name in (
            "operator",
            "dtype",
            "device",
            "topology",
            "framework",
            "framework_version",
            "kernel",
        )
    }
    columns["phase"] = ["forward"] * num_rows
    columns["dims"] = columns_to_dims(dims, num_rows)
    for statistic, values in latency_us.items():
        columns[f"latency_us_{statistic}"] = pa.array(values, mask=~np.isfinite(values))
    columns["num_samples"] = pa.array([facts.num_samples] * num_rows, pa.int64())
    columns["status"] = np.where(is_number, "ok", "failed").tolist()
    reason = "the source has no time for this row"
    columns["status_reason"] = pa.array([None if ok else reason for ok in is_number], pa.string())
    flags = [facts.flag] if facts.flag else None
    columns["flags"] = pa.array([flags] * num_rows, pa.list_(pa.string()))
    columns["source_file"] = [origin.source.name] * num_rows
    columns["source_hash"] = [origin.source.content_hash] * num_rows
    columns["source_row"] = pa.array(rows + 1)
    arrays = [
        pa.array(columns[field.name], field.type)
        if isinstance(columns.get(field.name), list)
        else columns.get(field.name, pa.nulls(num_rows, field.type)).cast(field.type)
        for field in MEASUREMENT_SCHEMA
    ]
    return pa.table(arrays, schema=MEASUREMENT_SCHEMA)


def _check_dims(
    operator: str, origin: SourceTable, rows: npt.NDArray[np.int64], dims: Mapping[str, Any]
) -> None:
    """Refuse here what the catalog would refuse, where the line is still known."""
    for dim in find_operator(operator).dims:
        is_legal = np.broadcast_to(np.asarray(dims[dim.name]) >= dim.minimum, len(rows))
        if not is_legal.all():
            place = int(np.argmin(is_legal))
            value = np.broadcast_to(dims[dim.name], len(rows))[place]
            raise origin.fault(
                int(rows[place]), f"{operator}: {dim.name} is {value}, below {dim.minimum}"
            )


def _is_number(text: object) -> bool:
    try:
        float(str(text))
    except ValueError:
        return False
    return True
