"""The layout of a dataset in a folder: Parquet files by device and operator, and a manifest.

`device=<device>/operator=<operator>/part-<n>.parquet`, as Hive lays out partitions, so DuckDB,
pandas (through pyarrow) and Spark read the folder as one table. Every file has the same columns:
the stored schema without the two that are folders, and in place of `dims` a column for each
dimension of any operator (or of those that are named), null where an operator has no such one.
Times are UTC.
`_manifest.json` says what the folder holds; names that begin with `_` are no data to those readers.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter, Run
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.wire.arrow import LATER_COLUMNS, STORED_SCHEMA

# The tool of runs that are imports of datasets.
DATASET_TOOL = "parquet"
MANIFEST_NAME = "_manifest.json"
DATASET_VERSION = 2
# Version 1 lacks the later columns.
READABLE_VERSIONS = (1, DATASET_VERSION)
PARTITIONS = ("device", "operator")
_PART = re.compile(r"device=([^/=]+)/operator=([^/=]+)/part-(\d+)\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFile:
    """A file of a dataset: its path from the folder, and the SHA-256 of its bytes."""

    path: str
    num_rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest:
    """What a dataset holds.

    `content_hash` is that of a snapshot with the same rows. `selection` chose them, `runs` brought
    them; `dims` are the columns that are dimensions.
    """

    version: int
    content_hash: str
    num_rows: int
    dims: tuple[str, ...]
    selection: MeasurementFilter
    runs: tuple[Run, ...]
    files: tuple[DatasetFile, ...]


def list_dims(operators: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of all dimensions of these operators; of all, if none is named.

    Raises:
        UnknownOperatorError: no file of that name.

    """
    specs = [find_operator(name) for name in operators] or all_operators().values()
    return tuple(sorted({name for spec in specs for name in spec.dim_names}))


def build_file_schema(dims: Sequence[str], version: int = DATASET_VERSION) -> pa.Schema:
    """Return the columns of a file of a dataset of that version."""
    fields: list[pa.Field] = []
    for field in STORED_SCHEMA:
        if version == 1 and field.name in LATER_COLUMNS:
            continue
        if field.name == "dims":
            fields += [pa.field(name, pa.int64()) for name in dims]
        elif field.name == "recorded_at":
            fields.append(pa.field(field.name, pa.timestamp("us", tz="UTC"), nullable=False))
        elif field.name not in PARTITIONS:
            fields.append(field)
    return pa.schema(fields)


def format_part_path(device: str, operator: str, number: int) -> str:
    """Return where the rows of an operator on a device lie, from the dataset's folder."""
    folder = f"device={quote(device, safe='')}/operator={quote(operator, safe='')}"
    return f"{folder}/part-{number}.parquet"


def parse_part_path(path: str) -> tuple[str, str]:
    """Return the device and the operator of a file.

    Raises:
        InvalidRequestError: no such file is part of a dataset.

    """
    match = _PART.fullmatch(path)
    if match is None:
        raise InvalidRequestError.of_field(
            "path", f"{MANIFEST_NAME} names {path!r}, which is no place in a dataset"
        )
    return unquote(match[1]), unquote(match[2])
