"""The Arrow schema of measurements, and how operators' dimensions travel in it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import ArrowStream

# What a row may say of the times of its calls.
LATENCY_STATISTICS = ("median", "mean", "min", "max", "std", "p10", "p90")

# One row is one operator timed at one point. Times are µs of one call on the device. A field is
# null where its source does not say. `dims` holds the operator's dimensions in their canonical
# order. `status` is `ok` or `failed` (out of memory, unsupported, not a number); a failed row has a
# `status_reason` and no times. `flags` are findings of quality tests, each `name: explanation`; a
# flagged row is kept and not trained on. `source_row` is the 1-based data row in `source_file`.
# `model` is the architecture whose layer was measured. `variant` says what operator, dims and dtype
# leave open, as `key=value` pairs sorted by key and joined by `;` (`kv=fp8`, `quant=int4_wo`,
# `routing=balanced`); null is the plain case, and only that is comparable with measurements of
# other sources. `kernel` is the code that was called, `kernel_name` what then took longest on the
# device. `throttle` names what held the device's clock back, joined by `,`: empty where nothing
# did.
MEASUREMENT_SCHEMA = pa.schema(
    [
        pa.field("operator", pa.string(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("dims", pa.map_(pa.string(), pa.int64()), nullable=False),
        pa.field("device", pa.string(), nullable=False),
        pa.field("topology", pa.string()),
        pa.field("framework", pa.string()),
        pa.field("framework_version", pa.string()),
        pa.field("kernel", pa.string()),
        pa.field("variant", pa.string()),
        pa.field("model", pa.string()),
        *(pa.field(f"latency_us_{name}", pa.float64()) for name in LATENCY_STATISTICS),
        pa.field("num_samples", pa.int64()),
        pa.field("power_w", pa.float64()),
        pa.field("clock_mhz", pa.float64()),
        pa.field("temperature_c", pa.float64()),
        pa.field("throttle", pa.string()),
        pa.field("kernel_name", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("status_reason", pa.string()),
        pa.field("flags", pa.list_(pa.string())),
        pa.field("source_file", pa.string()),
        pa.field("source_hash", pa.string()),
        pa.field("source_row", pa.int64()),
    ]
)

# Columns that writers of earlier versions do not have.
LATER_COLUMNS = ("temperature_c", "throttle", "kernel_name")

# What the catalog adds to every row it returns; `recorded_at` is UTC.
STORED_SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("batch_index", pa.int64(), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("recorded_at", pa.timestamp("us"), nullable=False),
        *MEASUREMENT_SCHEMA,
    ]
)


def rows_to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a table in the measurement schema; keys a row lacks become null.

    `dims` may be a plain mapping.
    """
    columns = {
        field.name: [_plain(field.name, row.get(field.name)) for row in rows]
        for field in MEASUREMENT_SCHEMA
    }
    return pa.table(columns, schema=MEASUREMENT_SCHEMA)


def open_stream(stream: ArrowStream) -> pa.RecordBatchReader:
    """Return a reader of an Arrow stream; what its source raises passes through."""
    # Through the C interface an error of the source would arrive as text alone.
    is_reader = isinstance(stream, pa.RecordBatchReader)
    return stream if is_reader else pa.RecordBatchReader.from_stream(stream)


def read_table(stream: ArrowStream) -> pa.Table:
    """Read an Arrow stream into memory; what its source raises passes through."""
    return pa.table(stream) if isinstance(stream, pa.Table) else open_stream(stream).read_all()


def check_measurement_table(table: pa.Table) -> pa.Table:
    """Return the table with exactly the measurement schema; later columns it lacks are null.

    Raises:
        InvalidRequestError: a column is missing, unknown, of another type, or null where it
            must not be.

    """
    expected = set(MEASUREMENT_SCHEMA.names)
    for name in LATER_COLUMNS:
        if name not in table.schema.names:
            empty = pa.nulls(table.num_rows, MEASUREMENT_SCHEMA.field(name).type)
            table = table.append_column(name, empty)
    missing = sorted(expected - set(table.schema.names))
    unknown = sorted(set(table.schema.names) - expected)
    if missing or unknown:
        raise InvalidRequestError(f"measurement rows: missing columns {missing}, unknown {unknown}")
    columns = [_check_column(table.column(field.name), field) for field in MEASUREMENT_SCHEMA]
    return pa.table(columns, schema=MEASUREMENT_SCHEMA)


def _check_column(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if not field.nullable and column.null_count:
        raise InvalidRequestError.of_field(field.name, "has empty values")
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as err:
        raise InvalidRequestError.of_field(
            field.name, f"expected {field.type}, found {column.type}: {err}"
        ) from err


def dims_to_columns(table: pa.Table, names: Iterable[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the named dimensions of rows that all have exactly these, in any order.

    Raises:
        InvalidRequestError: a row has other dimensions.

    """
    wanted = tuple(names)
    dims = table.column("dims").combine_chunks()
    if isinstance(dims, pa.ChunkedArray):
        dims = pa.concat_arrays(dims.chunks)
    encoded = dims.keys.dictionary_encode()
    keys = np.asarray(encoded.indices.to_numpy(zero_copy_only=False))
    codes = {name: code for code, name in enumerate(encoded.dictionary.to_pylist())}
    items = np.asarray(dims.items.to_numpy(zero_copy_only=False))
    if len(keys) != table.num_rows * len(wanted):
        raise InvalidRequestError(f"rows do not all have the dimensions {wanted}")
    keys = keys.reshape(table.num_rows, len(wanted))
    items = items.reshape(table.num_rows, len(wanted))
    columns: dict[str, npt.NDArray[np.int64]] = {}
    places = {code: place for place, code in enumerate(keys[0].tolist())} if len(keys) else {}
    own = [codes.get(name, -1) for name in wanted]
    # Nearly all sources write them in one order.
    if places and (keys == keys[0]).all() and places.keys() == set(own):
        return {
            name: items[:, places[code]].astype(np.int64)
            for name, code in zip(wanted, own, strict=True)
        }
    for name in wanted:
        is_here = keys == codes.get(name, -1)
        if not (is_here.sum(axis=1) == 1).all():
            raise InvalidRequestError(f"rows do not all have the dimension {name!r}")
        columns[name] = items[is_here].astype(np.int64)
    return columns


def _plain(name: str, value: Any) -> Any:
    return list(value.items()) if name == "dims" and isinstance(value, Mapping) else value
