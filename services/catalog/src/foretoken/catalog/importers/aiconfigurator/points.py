"""Rows of the catalog from columns, built a batch at a time when they are asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers, columns_to_dims
from foretoken.catalog.importers.aiconfigurator.perf_table import (
    Circumstances,
    Described,
    PerfTable,
)
from foretoken.catalog.sources.row import NO_TIME, fill_schema
from foretoken.domain.operators.spec.operator import find_operator

# A row group of DuckDB's, which it then writes once.
_BATCH_ROWS = 61_440
_TEXTS = tuple(field for field in Circumstances.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Rows of one file that measured one operator; every column has a value per row of these."""

    operator: str
    table: PerfTable
    described: Described
    dims: Mapping[str, Integers]
    latency_us: Floats
    power_w: Floats | None = None

    def batches(self) -> Iterator["PointBatch"]:
        """Yield the rows in the file's order."""
        for start in range(0, len(self.described.rows), _BATCH_ROWS):
            yield PointBatch(self, slice(start, start + _BATCH_ROWS))


def make_points(
    operator: str,
    table: PerfTable,
    described: Described,
    dims: Mapping[str, Any],
    *,
    num_calls: Integers | int = 1,
    latency_us: Floats | None = None,
) -> Points:
    """Return the described rows of a file that can be; the others are noted.

    `dims` have a value per row of the file, or one for all; the file's times, `latency_us` where
    they are not in its usual column, are those of `num_calls` calls.
    """
    latency_us = (table.latency_us if latency_us is None else latency_us) / num_calls
    described = table.without(described, latency_us < 0, "the latency is negative")
    columns: dict[str, Integers] = {}
    for dim in find_operator(operator).dims:
        columns[dim.name] = np.broadcast_to(
            np.asarray(dims[dim.name], dtype=np.int64), table.origin.num_rows
        )
        reason = f"{operator}: {dim.name} is below {dim.minimum}"
        described = table.without(described, columns[dim.name] < dim.minimum, reason)
    rows, power_w = described.rows, table.power_w
    return Points(
        operator=operator,
        table=table,
        described=described,
        dims={name: column[rows] for name, column in columns.items()},
        latency_us=latency_us[rows],
        power_w=None if power_w is None else power_w[rows],
    )


class PointBatch:
    """Some of the rows, as an Arrow stream; the wide table exists only while it is read."""

    def __init__(self, points: Points, span: slice) -> None:
        self._points = points
        self._span = span
        self.num_rows = len(points.described.rows[span])

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return an ArrowArrayStream capsule of rows in the measurement schema."""
        return self.to_table().__arrow_c_stream__(requested_schema)

    def to_table(self) -> pa.Table:
        """Return the rows in the measurement schema."""
        points, span, num_rows = self._points, self._span, self.num_rows
        described = points.described
        columns: dict[str, Any] = {
            name: _expand([getattr(found, name) for found in described.circumstances], codes)
            for name, codes in ((name, described.codes[span]) for name in _TEXTS)
        }
        latency_us = points.latency_us[span]
        has_time = np.isfinite(latency_us)
        same = np.zeros(num_rows, dtype=np.int64)
        source = points.table.origin.source
        columns |= {
            "operator": _expand([points.operator], same),
            "phase": _expand(["forward"], same),
            "dims": columns_to_dims(
                {name: column[span] for name, column in points.dims.items()}, num_rows
            ),
            "latency_us_median": pa.array(latency_us, mask=~has_time),
            "status": _expand(["failed", "ok"], has_time),
            "status_reason": _expand([NO_TIME, None], has_time),
            "source_file": _expand([source.name], same),
            "source_hash": _expand([source.content_hash], same),
            "source_row": pa.array(described.rows[span] + 1),
        }
        if points.power_w is not None:
            power_w = points.power_w[span]
            columns["power_w"] = pa.array(power_w, mask=~np.isfinite(power_w))
        return fill_schema(columns, num_rows)


def _expand(words: list[str | None], codes: Any) -> pa.Array:
    """Return the words that codes stand for."""
    indices = pa.array(np.asarray(codes, dtype=np.int64))
    return pa.array(words, pa.string()).take(indices)
