"""Write a dataset: a folder of Parquet files that DuckDB, pandas and Spark read.

See `dataset.py` for the layout. The rows are written as they come, whatever their number.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from foretoken.catalog.dataset import (
    DATASET_VERSION,
    MANIFEST_NAME,
    DatasetFile,
    DatasetManifest,
    build_file_schema,
    format_part_path,
    list_dims,
)
from foretoken.catalog.dims import DIM_COLUMNS, map_to_places
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest
from foretoken.catalog.reading.content import ContentHash
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, StorageFullError
from foretoken.domain.measurements.measurement import Run, RunKind
from foretoken.domain.name import path_inside
from foretoken.domain.operators.spec.operator import find_operator

_ROW_GROUP_ROWS = 100_000
# Rows that wait for their row group to fill, over all partitions.
_WAITING_ROWS_MAX = 1_000_000
_OPEN_FILES_MAX = 64
# Columns that count rows.
_COUNTING = ("row_index", "source_row")
# How hard zstd compresses where nobody says, and at most. NVIDIA's tables of GEMM, experts and
# attention are 4 to 9 % smaller by 9, 12 to 17 % by 19.
_LEVEL, _LEVEL_MAX = 1, 22


def _save(rows: pa.RecordBatchReader, request: ExportRequest) -> ExportReport:
    content = ContentHash()
    run_ids: dict[str, None] = {}
    operators = list(filter(None, request.options.get("operators", "").split(",")))
    writer = _DatasetWriter(request.path, list_dims(operators), level=_read_level(request))
    with removed_on_failure(request.path, writer.names, is_new=not request.path.exists()):
        with contextlib.closing(writer):
            for piece in rows:
                placed = _with_places(piece)
                content.add(placed)
                run_ids.update(dict.fromkeys(piece.column("run_id").unique().to_pylist()))
                writer.add(placed)
        if not content.num_rows:
            raise InvalidRequestError.of_field("selection", "selects no rows to export")
        manifest = DatasetManifest(
            version=DATASET_VERSION,
            content_hash=content.hexdigest(),
            num_rows=content.num_rows,
            dims=writer.dims,
            selection=request.selection,
            runs=_find_runs(request.runs, run_ids),
            files=tuple(_describe_file(request.path, name) for name in writer.names),
        )
        text = json.dumps(schema.encode(manifest), indent=1, ensure_ascii=False)
        with _writing_to(request.path):
            (request.path / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    return ExportReport(files=(*writer.names, MANIFEST_NAME), num_rows=content.num_rows)


def _read_level(request: ExportRequest) -> int:
    said = request.options.get("level", str(_LEVEL))
    if not said.isdecimal() or not 1 <= int(said) <= _LEVEL_MAX:
        raise InvalidRequestError.of_field("options.level", f"from 1 to {_LEVEL_MAX}")
    return int(said)


class _DatasetWriter:
    """Sorts rows into partitions and writes each in row groups."""

    def __init__(
        self,
        root: Path,
        dims: Sequence[str],
        row_group_rows: int = _ROW_GROUP_ROWS,
        max_open_files: int = _OPEN_FILES_MAX,
        level: int = _LEVEL,
    ) -> None:
        self.dims = tuple(dims)
        self.names: list[str] = []
        self._root = root
        self._row_group_rows = row_group_rows
        self._max_open_files = max_open_files
        self._level = level
        self._schema = build_file_schema(dims)
        # Times differ in their low bytes, places of rows by one: neither repeats.
        self._encodings = {
            field.name: "BYTE_STREAM_SPLIT"
            for field in self._schema
            if pa.types.is_floating(field.type)
        } | dict.fromkeys(_COUNTING, "DELTA_BINARY_PACKED")
        self._coded = [name for name in self._schema.names if name not in self._encodings]
        self._open: dict[tuple[str, str], parquet.ParquetWriter] = {}
        self._waiting: dict[tuple[str, str], list[pa.RecordBatch]] = {}
        self._num_parts: dict[tuple[str, str], int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows with their dimensions by place."""
        for partition, part in _split(rows):
            columns = _to_columns(part, partition[1], self._schema)
            waiting = self._waiting.setdefault(partition, [])
            waiting.append(columns)
            if _count_rows(waiting) >= self._row_group_rows:
                self._write(partition)
        while sum(map(_count_rows, self._waiting.values())) > _WAITING_ROWS_MAX:
            self._write(max(self._waiting, key=lambda key: _count_rows(self._waiting[key])))

    def close(self) -> None:
        """Write what waits and close the files."""
        for partition in list(self._waiting):
            self._write(partition)
        with _writing_to(self._root):
            while self._open:
                self._open.popitem()[1].close()

    def _write(self, partition: tuple[str, str]) -> None:
        rows = pa.Table.from_batches(self._waiting.pop(partition))
        with _writing_to(self._root):
            writer = self._file_of(partition, rows)
            writer.write_table(rows, row_group_size=self._row_group_rows)

    def _file_of(self, partition: tuple[str, str], first: pa.Table) -> parquet.ParquetWriter:
        if partition not in self._open:
            if len(self._open) == self._max_open_files:
                self._open.pop(next(iter(self._open))).close()
            number = self._num_parts.get(partition, 0)
            self._num_parts[partition] = number + 1
            name = format_part_path(*partition, number)
            path = path_inside(self._root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.names.append(name)
            # Most columns are those of other operators, and in a small file what is said of each
            # column takes more than the rows.
            filled = [name for name in first.schema.names if first[name].null_count < len(first)]
            self._open[partition] = parquet.ParquetWriter(
                path,
                self._schema,
                compression="zstd",
                compression_level=self._level,
                use_dictionary=[name for name in self._coded if name in filled],
                write_statistics=False,
                column_encoding=self._encodings,
                store_schema=False,
            )
        return self._open[partition]


def _with_places(rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = {
        name: column
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        if name != "dims"
    }
    columns |= map_to_places(rows.column("dims"))
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _split(rows: pa.RecordBatch) -> Iterator[tuple[tuple[str, str], pa.RecordBatch]]:
    """Yield the rows of each device and operator."""
    devices, operators = (rows.column(name).dictionary_encode() for name in ("device", "operator"))
    num_operators = len(operators.dictionary)
    codes = devices.indices.to_numpy() * num_operators + operators.indices.to_numpy()
    for code in np.unique(codes).tolist():
        is_here = codes == code
        device, operator = divmod(code, num_operators)
        partition = (devices.dictionary[device].as_py(), operators.dictionary[operator].as_py())
        yield partition, rows if is_here.all() else rows.filter(pa.array(is_here))


def _to_columns(rows: pa.RecordBatch, operator: str, wanted: pa.Schema) -> pa.RecordBatch:
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    own = find_operator(operator).dim_names
    if not set(own) <= set(wanted.names):
        raise InvalidRequestError.of_field("options.operators", f"there are rows of {operator} too")
    for name, place in zip(own, DIM_COLUMNS, strict=False):
        columns[name] = columns[place]
    empty = pa.nulls(rows.num_rows, pa.int64())
    arrays = [columns.get(field.name, empty).cast(field.type) for field in wanted]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _count_rows(pieces: Sequence[pa.RecordBatch]) -> int:
    return sum(piece.num_rows for piece in pieces)


def _find_runs(known: Sequence[Run], run_ids: dict[str, None]) -> tuple[Run, ...]:
    """Return the runs that brought rows; of one the caller did not describe, only its id."""
    by_id = {run.run_id: run for run in known}
    return tuple(
        by_id.get(run_id, Run(run_id=run_id, kind=RunKind.IMPORT, tool="")) for run_id in run_ids
    )


def _describe_file(root: Path, name: str) -> DatasetFile:
    with (root / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_rows = parquet.ParquetFile(file).metadata.num_rows
    return DatasetFile(path=name, num_rows=num_rows, sha256=digest)


@contextlib.contextmanager
def removed_on_failure(root: Path, names: Sequence[str], *, is_new: bool) -> Iterator[None]:
    """Leave no half of a dataset: of these files and their folders nothing, all else as it is.

    Names may be added meanwhile. The root goes where it `is_new`.
    """
    try:
        yield
    except BaseException:
        for name in (*names, MANIFEST_NAME):
            with contextlib.suppress(OSError):
                (root / name).unlink()
            for place in range(name.count("/")):
                with contextlib.suppress(OSError):  # what another wrote there stays
                    (root / name).parents[place].rmdir()
        if is_new:
            with contextlib.suppress(OSError):
                root.rmdir()
        raise


@contextlib.contextmanager
def _writing_to(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"the disk of {root} is full; make room for the export") from err
        raise InvalidRequestError.of_field("path", f"{root}: {err.strerror or err}") from err


EXPORTER = Exporter(
    name="parquet",
    summary="a folder of Parquet files by device and operator, for DuckDB, pandas and Spark",
    save=_save,
    options={
        "level": f"how hard zstd compresses, from 1 to {_LEVEL_MAX}",
        "operators": "what the rows are of, with commas: columns for their dimensions alone",
    },
)
