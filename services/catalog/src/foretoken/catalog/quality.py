"""Judge measurements at ingest: rows that failed, and rows to doubt.

A failed row has no times; a flagged one keeps them, with the reason, and is not trained on.
Rows are compared inside their batch, among those of the same software.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.dims import Columns, Indices, OperatorRows, group_rows
from foretoken.catalog.outliers import deviations_from_lines, merge_duplicates
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType, Phase
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.units import US_PER_S

Floats = npt.NDArray[np.float64]

# A latency below this part of the roofline cannot be true.
_ROOFLINE_RATIO_MIN = 0.5
# Off the neighbours by more than this factor, either way.
_LINE_RATIO_MAX = 1.5
# Two measurements of one point apart by more than this part.
_DUPLICATE_RATIO_MAX = 0.1
# Differences below this are the resolution of the timers in use (Vidur's tables have 0.5-1 us).
_RESOLUTION_US = 2.0

LATENCY_COLUMNS = tuple(
    f"latency_us_{statistic}" for statistic in ("median", "mean", "min", "max", "std", "p10", "p90")
)
# Rows are comparable when these agree; their operator does already.
_GROUP_COLUMNS = (
    "device",
    "topology",
    "dtype",
    "phase",
    "framework",
    "framework_version",
    "kernel",
)
_STATUSES = ("ok", "failed")


@dataclass(frozen=True, slots=True)
class Judged:
    """A table with its failures and flags written in, and how many there are."""

    table: pa.Table
    num_flagged: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Per row: the time below which no device gets, and a plain estimate of the time."""

    least_us: Floats
    expected_us: Floats


def judge(table: pa.Table, groups: Sequence[OperatorRows]) -> Judged:
    """Return the table with failed rows emptied and doubtful rows flagged.

    Flags that a row brought are kept; such a row is not held against its neighbours.

    Raises:
        UnknownDeviceError: a row's device has no file.
        UnknownTopologyError: a collective's topology has no file.
        InvalidRequestError: a status, dtype or phase that does not exist, or a collective
            without topology; the message names the row.

    """
    flags: list[list[str]] = [list(found or ()) for found in table.column("flags").to_pylist()]
    _check_words(table, "status", _STATUSES)
    _check_words(table, "dtype", tuple(dtype.name.lower() for dtype in DType))
    _check_words(table, "phase", tuple(phase.name.lower() for phase in Phase))
    table, is_ok = _fail_impossible(table)
    latency_us = table.column("latency_us_median").to_numpy()
    is_trusted = is_ok & np.array([not found for found in flags], dtype=bool)
    for group, first in _comparable_rows(table, groups):
        bounds = _bounds_of(group, first)
        ok = np.flatnonzero(is_ok[group.indices])
        too_fast = _flag_too_fast(group, ok, latency_us, bounds, flags)
        trusted = ok[is_trusted[group.indices[ok]] & ~too_fast]
        _flag_misfits(group, trusted, latency_us, bounds.expected_us, flags)
    position = table.schema.get_field_index("flags")
    field = table.schema.field("flags")
    column = pa.array([found or None for found in flags], field.type)
    num_flagged = sum(bool(found) for found in flags)
    return Judged(
        table.set_column(position, field, column), num_flagged, int(len(is_ok) - is_ok.sum())
    )


def _check_words(table: pa.Table, name: str, known: tuple[str, ...]) -> None:
    words = table.column(name)
    unknown = [word for word in words.unique().to_pylist() if word not in known]
    if unknown:
        row = words.to_pylist().index(unknown[0])
        raise InvalidRequestError.of_field(
            name, f"row {row}: {unknown[0]!r} is not one of {', '.join(known)}"
        )


def _fail_impossible(table: pa.Table) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    """Fail rows whose median is missing, not finite or not positive; empty all failed rows."""
    latency_us = table.column("latency_us_median").to_numpy()
    was_ok = np.asarray(table.column("status").to_numpy(zero_copy_only=False)) == "ok"
    is_ok = was_ok & np.isfinite(latency_us) & (latency_us > 0)
    if is_ok.all():
        return table, is_ok
    reasons = table.column("status_reason").to_pylist()
    for row in np.flatnonzero(~is_ok).tolist():
        if was_ok[row]:
            value = latency_us[row]
            is_missing = table.column("latency_us_median")[row].as_py() is None
            reasons[row] = "the latency is missing" if is_missing else f"latency of {value} us"
        reasons[row] = reasons[row] or "no reason given"
    columns: dict[str, Any] = {
        name: pa.array(
            np.asarray(table.column(name).to_numpy()),
            mask=~is_ok | table.column(name).is_null().to_numpy(),
        )
        for name in LATENCY_COLUMNS
    }
    columns["status"] = pa.array(np.where(is_ok, "ok", "failed").tolist())
    columns["status_reason"] = pa.array(reasons, pa.string())
    for name, column in columns.items():
        position = table.schema.get_field_index(name)
        table = table.set_column(position, table.schema.field(name), column)
    return table, is_ok


def _comparable_rows(
    table: pa.Table, groups: Sequence[OperatorRows]
) -> Iterator[tuple[OperatorRows, dict[str, str | None]]]:
    """Yield the rows of an operator that share the group columns, with those columns' values."""
    coded = [table.column(name).combine_chunks().dictionary_encode() for name in _GROUP_COLUMNS]
    coded = [c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in coded]
    codes = [c.indices.fill_null(-1).to_numpy(zero_copy_only=False) for c in coded]
    for group in groups:
        order, starts = group_rows([column[group.indices] for column in codes])
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
            places = np.sort(order[start:stop])
            rows = group.indices[places]
            first = {name: table.column(name)[int(rows[0])].as_py() for name in _GROUP_COLUMNS}
            columns = {name: column[places] for name, column in group.columns.items()}
            yield OperatorRows(group.spec, rows, columns), first


def _bounds_of(group: OperatorRows, first: dict[str, str | None]) -> _Bounds:
    device = find_device(first["device"] or "")
    if group.spec.is_collective:
        return _collective_bounds(group, first["topology"])
    dtype, phase = DType[(first["dtype"] or "").upper()], Phase[(first["phase"] or "").upper()]
    terms = compute_terms(group.spec, _as_floats(group.columns), dtype, phase, device)
    compute_us, memory_us = np.asarray(terms.compute_us), np.asarray(terms.memory_us)
    # What fits the last-level cache may be there already and need not cross the memory bus.
    cached_us = device.l2_cache_bytes / device.memory_bandwidth_bytes_per_s * US_PER_S
    return _Bounds(
        np.maximum(compute_us, memory_us - cached_us),
        terms.floor_us + np.maximum(compute_us, memory_us),
    )


def _collective_bounds(group: OperatorRows, topology: str | None) -> _Bounds:
    if topology is None:
        raise InvalidRequestError.of_field(
            "topology", f"row {group.indices[0]}: {group.spec.name} needs a topology"
        )
    links = find_topology(topology)
    columns = _as_floats(group.columns)
    num_nodes = group.columns["num_nodes"]
    least_us, floor_us = np.zeros(len(num_nodes)), np.zeros(len(num_nodes))
    for number in np.unique(num_nodes).tolist():
        rows = num_nodes == number
        terms = collective_terms(
            group.spec, {name: c[rows] for name, c in columns.items()}, number, links
        )
        least_us[rows], floor_us[rows] = terms.memory_us, terms.floor_us
    return _Bounds(least_us, floor_us + least_us)


def _flag_too_fast(
    group: OperatorRows,
    ok: Indices,
    latency_us: Floats,
    bounds: _Bounds,
    flags: list[list[str]],
) -> npt.NDArray[np.bool_]:
    rows = group.indices[ok]
    too_fast = latency_us[rows] < _ROOFLINE_RATIO_MIN * bounds.least_us[ok]
    for place in np.flatnonzero(too_fast):
        row = rows[place]
        flags[row].append(
            f"faster_than_physics: {latency_us[row]:.4g} us where the device needs at least "
            f"{bounds.least_us[ok[place]]:.4g} us"
        )
    return np.asarray(too_fast)


def _flag_misfits(
    group: OperatorRows,
    trusted: Indices,
    latency_us: Floats,
    expected_us: Floats,
    flags: list[list[str]],
) -> None:
    """Flag rows that disagree with their point's median, and points that leave their line."""
    if not len(trusted):
        return
    rows = group.indices[trusted]
    times_us = latency_us[rows]
    columns: Columns = {name: column[trusted] for name, column in group.columns.items()}
    points = merge_duplicates(columns, times_us)
    of_point = points.latency_us[points.point_of_row]
    is_apart = np.abs(times_us / of_point - 1) > _DUPLICATE_RATIO_MAX
    is_apart &= np.abs(times_us - of_point) > _RESOLUTION_US
    for place in np.flatnonzero(is_apart):
        flags[rows[place]].append(
            f"duplicate_disagrees: {times_us[place]:.4g} us where this point's median is "
            f"{of_point[place]:.4g} us"
        )
    ratios = deviations_from_lines(
        points.columns_of(columns), points.latency_us, expected_us[trusted][points.rows]
    )
    is_off = np.maximum(ratios, 1 / ratios) > _LINE_RATIO_MAX
    is_off &= np.abs(points.latency_us * (1 - 1 / ratios)) > _RESOLUTION_US
    for place in np.flatnonzero(is_off[points.point_of_row]):
        ratio = ratios[points.point_of_row[place]]
        flags[rows[place]].append(f"local_outlier: {ratio:.3g} times what its neighbours suggest")


def _as_floats(columns: Columns) -> dict[str, Floats]:
    # Work counts overflow 64-bit integers from about 2e18 operations on.
    return {name: column.astype(np.float64) for name, column in columns.items()}
