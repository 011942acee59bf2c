"""Read the files of a dataset, each only if it is as it was written."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from foretoken.catalog.dataset import (
    MANIFEST_NAME,
    DatasetFile,
    DatasetManifest,
    build_file_schema,
    parse_part_path,
)
from foretoken.catalog.dims import DIM_COLUMNS
from foretoken.catalog.sources.file import current_budget, read_source_file, refuse
from foretoken.catalog.sources.table import check_texts
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.wire.arrow import LATER_COLUMNS

_GROUP_ROWS_MAX = 1_000_000
# What the texts of a column of one row group may take: a small file can repeat a long text often.
_GROUP_TEXT_BYTES_MAX = 256 << 20
_FLAG_PATH = "flags.list.element"


class DatasetReader:
    """Reads row groups; keeps the file it read last in memory."""

    def __init__(self, root: Path, manifest: DatasetManifest) -> None:
        self._root = root
        self._schema = build_file_schema(manifest.dims, manifest.version)
        self._last: tuple[DatasetFile, parquet.ParquetFile] | None = None

    def count_groups(self, entry: DatasetFile) -> int:
        """Return the number of row groups in a file.

        Raises:
            InvalidRequestError: the file is not as it was written, or unpacks to too much.

        """
        return int(self._open(entry).metadata.num_row_groups)

    def read_group(self, entry: DatasetFile, group: int) -> pa.RecordBatch:
        """Return a row group with the columns of the file, its folders and dimensions by place.

        Raises:
            InvalidRequestError: the file is not as it was written, or unpacks to too much.
            UnknownOperatorError: there is no such operator here.

        """
        path = self._root / entry.path
        try:
            table = self._open(entry).read_row_group(group, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as err:
            refuse(path, f"cannot be read: {err}")
        names = self._schema.names
        for name in names:
            check_texts(table.column(name), name, path)
        columns = {name: pa.nulls(table.num_rows) for name in LATER_COLUMNS}
        columns |= {name: _unpack(table.column(name), path) for name in names}
        device, operator = parse_part_path(entry.path)
        columns["device"] = pa.repeat(device, table.num_rows)
        columns["operator"] = pa.repeat(operator, table.num_rows)
        dims = find_operator(operator).dim_names
        missing = [name for name in dims if name not in columns or columns[name].null_count]
        if missing:
            refuse(path, f"{operator} needs {', '.join(missing)} in every row")
        for index, place in enumerate(DIM_COLUMNS):
            has_place = index < len(dims)
            columns[place] = (
                columns[dims[index]] if has_place else pa.nulls(table.num_rows, pa.int64())
            )
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def close(self) -> None:
        """Give the memory of the last file back."""
        self._last = None

    def _open(self, entry: DatasetFile) -> parquet.ParquetFile:
        if self._last is None or self._last[0] != entry:
            self._last = None  # one file at a time
            self._last = (entry, self._open_file(entry))
        return self._last[1]

    def _open_file(self, entry: DatasetFile) -> parquet.ParquetFile:
        path = self._root / entry.path
        source = read_source_file(path, self._root)
        if source.content_hash != entry.sha256:
            refuse(path, "has changed since it was written; copy the dataset again")
        content = pa.BufferReader(source.content)
        texts = [field.name for field in self._schema if pa.types.is_string(field.type)]
        try:
            file = parquet.ParquetFile(content)
            if not file.schema_arrow.remove_metadata().equals(self._schema):
                refuse(path, "has other columns than a dataset")
            _check_size(file.metadata, entry, path)
            return parquet.ParquetFile(content, read_dictionary=[*texts, _FLAG_PATH])
        except (pa.ArrowException, OSError, ValueError) as err:
            refuse(path, f"is no Parquet file: {err}")


def check_listing(root: Path, entries: Sequence[DatasetFile]) -> None:
    """Check that the files of a manifest lie in the folder, and no others.

    Raises:
        InvalidRequestError: one is missing, too many, a link, or no place in a dataset; names it.

    """
    listed = {entry.path for entry in entries}
    if len(listed) < len(entries):
        refuse(root / MANIFEST_NAME, "names a file twice")
    for name in sorted(listed):
        parse_part_path(name)
        path = root / name
        if any(place.is_symlink() for place in (path, path.parent, path.parent.parent)):
            refuse(path, "is a link, or lies behind one; copy the file itself")
        if not path.is_file():
            refuse(path, "is missing; copy the dataset again")
    for path in sorted(root.rglob("*.parquet")):
        if path.relative_to(root).as_posix() not in listed:
            refuse(path, f"is not in {MANIFEST_NAME}; remove it")


def _check_size(about: parquet.FileMetaData, entry: DatasetFile, path: Path) -> None:
    groups = [about.row_group(index) for index in range(about.num_row_groups)]
    if about.num_rows != entry.num_rows:
        refuse(path, f"has {about.num_rows} rows where {MANIFEST_NAME} says {entry.num_rows}")
    if any(group.num_rows > _GROUP_ROWS_MAX for group in groups):
        refuse(path, f"has row groups of more than {_GROUP_ROWS_MAX} rows")
    current_budget().spend(sum(group.total_byte_size for group in groups), path)


def _unpack(column: pa.ChunkedArray, path: Path) -> pa.Array:
    """Return a column without dictionaries, if it takes a bearable size then."""
    chunks = [_unpack_chunk(chunk, path) for chunk in column.chunks]
    return pa.concat_arrays(chunks) if chunks else pa.array([], column.type)


def _unpack_chunk(chunk: pa.Array, path: Path) -> pa.Array:
    texts = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
    if not pa.types.is_dictionary(texts.type):
        return chunk
    lengths = pc.binary_length(texts.dictionary).take(texts.indices.drop_null())
    if (pc.sum(lengths.cast(pa.int64())).as_py() or 0) > _GROUP_TEXT_BYTES_MAX:
        refuse(path, f"unpacks to more than {_GROUP_TEXT_BYTES_MAX} bytes of text in a row group")
    return chunk.cast(pa.list_(pa.string()) if texts is not chunk else pa.string())
