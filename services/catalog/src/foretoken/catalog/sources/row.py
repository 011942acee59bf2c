"""Measurement rows from what was read of a source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers, columns_to_dims
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

# The texts that tell what was measured, on and with what; columns of the schema.
FACT_NAMES = (
    "operator",
    "phase",
    "dtype",
    "device",
    "topology",
    "framework",
    "framework_version",
    "kernel",
    "variant",
    "model",
)
# Why a row without a time is a failed one.
NO_TIME = "the source has no time for this row"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """What rows taken from one source have in common; `flag` flags them all."""

    operator: str
    dtype: str
    device: str
    phase: str = "forward"
    topology: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    kernel: str | None = None
    variant: str | None = None
    model: str | None = None
    num_samples: int | None = None
    flag: str = ""


def build_rows(
    facts: RowFacts,
    origin: SourceTable,
    rows: Integers,
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
    check_dims(facts.operator, origin, rows, dims)
    has_time = np.isfinite(latency_us["median"]).tolist()
    columns = {name: [getattr(facts, name)] * num_rows for name in FACT_NAMES}
    columns |= {
        f"latency_us_{statistic}": pa.array(values, mask=~np.isfinite(values))
        for statistic, values in latency_us.items()
    }
    columns |= {
        "dims": columns_to_dims(dims, num_rows),
        "num_samples": [facts.num_samples] * num_rows,
        "status": ["ok" if ok else "failed" for ok in has_time],
        "status_reason": [None if ok else NO_TIME for ok in has_time],
        "flags": [[facts.flag] if facts.flag else None] * num_rows,
        "source_file": [origin.source.name] * num_rows,
        "source_hash": [origin.source.content_hash] * num_rows,
        "source_row": pa.array(rows + 1),
    }
    return fill_schema(columns, num_rows)


def fill_schema(columns: Mapping[str, Any], num_rows: int) -> pa.Table:
    """Return rows in the measurement schema, null in the columns that are not given."""
    arrays = [
        pa.array(column, field.type) if isinstance(column, list) else column.cast(field.type)
        for field in MEASUREMENT_SCHEMA
        for column in (columns.get(field.name, pa.nulls(num_rows)),)
    ]
    return pa.table(arrays, schema=MEASUREMENT_SCHEMA)


def check_dims(operator: str, origin: SourceTable, rows: Integers, dims: Mapping[str, Any]) -> None:
    """Check what the catalog would refuse here, where the line is still known.

    Raises:
        InvalidRequestError: a dimension is smaller than the operator's least; names the line.

    """
    for dim in find_operator(operator).dims:
        values = np.broadcast_to(np.asarray(dims[dim.name]), len(rows))
        if (values < dim.minimum).any():
            place = int(np.argmax(values < dim.minimum))
            raise origin.fault(
                int(rows[place]), f"{operator}: {dim.name} is {values[place]}, below {dim.minimum}"
            )
