"""From catalog rows to series."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.domain.errors import UnknownDeviceError, UnknownTopologyError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.sustained import BURSTS_WITH_POWER
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.operators.spec.operator import OperatorSpec, all_operators, find_operator
from foretoken.domain.operators.spec.overlap import is_of_overlap
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.series import (
    Series,
    SeriesKey,
    build_series,
    find_distinct,
    group_medians,
    unite_series,
)
from foretoken.predictor.sustained import to_burst_us
from foretoken.wire.arrow import dims_to_columns, open_stream

_log = logging.getLogger(__name__)

_GROUP_COLUMNS = ("operator", "device", "topology", "dtype", "phase", "framework", "variant")
# A kernel that was measured at fewer points of a series is not asked for by name.
_MIN_KERNEL_POINTS = 8


def read_series(stream: ArrowStream) -> tuple[Series, ...]:
    """Return every series of the rows that can be trained on, in the order of their keys.

    Rows that failed or are flagged are left out, and those of an operator, device or topology
    without a file. A variant (another number format of weights or cache, another routing, launched
    in another way) is a series of its own. At each point only the rows of the fastest kernel count,
    which an engine would choose; where there are several kernels, each has one more series.
    Where several frameworks measured the same circumstances, one more series with an empty
    framework unites them.
    """
    # Piece by piece: what is not needed is gone before the next one comes.
    pieces = [keep_usable(pa.Table.from_batches([piece])) for piece in open_stream(stream)]
    table = pa.concat_tables(pieces) if pieces else pa.table({})
    series: dict[SeriesKey, Series] = {}
    for key, rows in group_rows(table).items():
        series[key] = read_fastest(key, rows)
        series |= _kernel_series(key, rows, series[key].kernels)
    by_circumstances: dict[SeriesKey, list[Series]] = {}
    for item in series.values():
        if item.key.kernel:
            continue
        any_framework = dataclasses.replace(item.key, framework="")
        by_circumstances.setdefault(any_framework, []).append(item)
    for key, members in by_circumstances.items():
        if len(members) > 1:
            series[key] = unite_series(key, members)
    return tuple(series[key] for key in sorted(series))


def read_fastest(key: SeriesKey, rows: pa.Table) -> Series:
    """Return the series of usable rows that have its circumstances, with the fastest kernels."""
    fastest = build_series(key, *read_points(key.spec, take_fastest_kernel(key.spec, rows)))
    kernels = tuple(sorted(set(pc.unique(rows["kernel"]).to_pylist()) - {""}))
    return dataclasses.replace(fastest, kernels=kernels)


def keep_usable(table: pa.Table, tolerated_flags: tuple[str, ...] = ()) -> pa.Table:
    """Return the rows that neither failed nor are flagged for other reasons than those tolerated.

    Those of calls concurrent with others are left out: they tell how two disturb each other.
    Columns: the circumstances, without nulls, `kernel`, `dims`, `latency_us` and `is_sustained`.
    What repeats in most rows is encoded: millions of texts take longer than all else.
    """
    latency = pc.coalesce(table["latency_us_median"], table["latency_us_mean"])
    num_flags = _count_flags(table["flags"], tolerated_flags)
    is_usable = pc.and_(
        pc.and_(pc.equal(table["status"], "ok"), pa.array(num_flags == 0)),
        pc.and_(pc.is_finite(latency), pc.greater(latency, 0.0)),
    )
    names = ("operator", "device", "dtype", "phase", "topology", "kernel", "variant")
    columns = {name: _encode(table[name]) for name in names}
    columns["dims"] = _encode_dims(table["dims"])
    named = _join(_encode(table["framework"]), _encode(table["framework_version"]))
    # What has a mean power was timed for about a second, which most others were not.
    has_power = pc.fill_null(pc.greater(table["power_w"], 0.0), fill_value=False)
    is_burst = _is_one_of(named, BURSTS_WITH_POWER)
    is_sustained = pc.and_not(has_power, is_burst)
    columns |= {"framework": named, "latency_us": latency, "is_sustained": is_sustained}
    variant = columns["variant"]
    is_alone = pc.invert(_is_one_of(variant, filter(is_of_overlap, variant.dictionary.to_pylist())))
    return pa.table(columns).filter(pc.fill_null(pc.and_(is_usable, is_alone), fill_value=False))


def _encode(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return texts by their number among the distinct ones; null is the empty text."""
    coded = _whole(column).dictionary_encode(null_encoding="encode")
    names = pa.array([name or "" for name in coded.dictionary.to_pylist()], pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, names)


def _is_one_of(column: pa.DictionaryArray, names: Iterable[str]) -> pa.BooleanArray:
    """Return which texts are among the names."""
    chosen = frozenset(names)
    is_chosen = np.array([name in chosen for name in column.dictionary.to_pylist()], bool)
    return pa.array(is_chosen[column.indices.to_numpy()])


def _join(first: pa.DictionaryArray, second: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return two texts of each row with a space between them, or none where one is empty."""
    names = second.dictionary.to_pylist()
    pairs = [f"{one} {other}".strip() for one in first.dictionary.to_pylist() for other in names]
    codes = first.indices.to_numpy().astype(np.int32) * len(names) + second.indices.to_numpy()
    distinct, place = np.unique(codes, return_inverse=True)
    found = pa.array([pairs[code] for code in distinct.tolist()], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(place.astype(np.int32)), found)


def _encode_dims(column: pa.ChunkedArray) -> pa.MapArray:
    """Return dimensions whose names are encoded."""
    dims = _whole(column)
    first, last = dims.offsets[0].as_py(), dims.offsets[-1].as_py()
    keys = dims.keys.slice(first, last - first).dictionary_encode()
    items = dims.items.slice(first, last - first)
    return pa.MapArray.from_arrays(pc.subtract(dims.offsets, first), keys, items)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece."""
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _count_flags(flags: pa.ChunkedArray, tolerated: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Return for every row how many of its flags are not tolerated."""
    rows = pc.list_parent_indices(flags).to_numpy()
    # A flag is a name and what was found: "duplicate_disagrees: 150 us where ...".
    names = pc.replace_substring_regex(pc.list_flatten(flags), ":.*", "")
    is_tolerated = pc.is_in(names, pa.array(tolerated, pa.string())).to_numpy()
    return np.bincount(rows[~is_tolerated], minlength=len(flags))


def group_rows(table: pa.Table) -> Mapping[SeriesKey, pa.Table]:
    """Return the usable rows of each series whose operator and device have files."""
    parts: dict[SeriesKey, list[pa.Table]] = {}
    for key, rows in _split_rows(table):
        parts.setdefault(key, []).append(rows)
    return {key: pa.concat_tables(own) for key, own in parts.items()}


def _split_rows(table: pa.Table) -> Iterable[tuple[SeriesKey, pa.Table]]:
    """Yield the rows of each set of circumstances, of which several may be one series."""
    if not table.num_rows:
        return
    codes = [_whole(table[name]).indices.to_numpy() for name in _GROUP_COLUMNS]
    group = find_distinct(np.stack(codes, axis=1))[1]
    order = np.argsort(group, kind="stable")
    for places in np.split(order, np.cumsum(np.bincount(group))[:-1]):
        # Rows of a series lie together: looking through all for each would take longer than models.
        first, end = int(places[0]), int(places[-1]) + 1
        is_own = group[first:end] == group[first]
        rows = table.slice(first, end - first)
        if not is_own.all():
            rows = rows.filter(pa.array(is_own))
        key = _canonical_key(tuple(rows[name][0].as_py() for name in _GROUP_COLUMNS))
        if key is not None:
            yield key, _as_bursts(key, rows)


def _as_bursts(key: SeriesKey, rows: pa.Table) -> pa.Table:
    """Return rows with the times that those timed for long would have had in a burst."""
    places = np.flatnonzero(rows["is_sustained"].to_numpy())
    if not len(places):
        return rows
    points, latency_us = read_points(key.spec, rows)
    columns = dict(zip(key.spec.dim_names, points[places].T, strict=True))
    bursts_us = latency_us.copy()
    bursts_us[places] = to_burst_us(key.spec, columns, key.target, latency_us[places])
    index = rows.schema.get_field_index("latency_us")
    return rows.set_column(index, "latency_us", pa.array(bursts_us))


def _canonical_key(values: tuple[str, ...]) -> SeriesKey | None:
    operator, device, topology, dtype, phase, framework, variant = values
    if operator not in all_operators():
        _log.warning("rows of an unknown operator are not trained on: operator=%s", operator)
        return None
    try:
        device = find_device(device).name
        if find_operator(operator).is_collective:
            topology = topology or topology_of_device(device).name
            device, dtype = find_topology(topology).device, ""
        else:
            topology = ""
    except (UnknownDeviceError, UnknownTopologyError) as err:
        _log.warning("rows are not trained on: operator=%s: %s", operator, err.message)
        return None
    return SeriesKey(operator, device, topology, dtype.lower(), phase.lower(), framework, variant)


def _kernel_series(key: SeriesKey, rows: pa.Table, names: Sequence[str]) -> dict[SeriesKey, Series]:
    """Return one series per kernel by name, where there is more than one kernel."""
    found: dict[SeriesKey, Series] = {}
    for name in names if len(names) > 1 else ():
        own = dataclasses.replace(key, kernel=name)
        points, latency_us = read_points(key.spec, rows.filter(pc.equal(rows["kernel"], name)))
        series = build_series(own, points, latency_us)
        if len(series.points) >= _MIN_KERNEL_POINTS:
            found[own] = dataclasses.replace(series, kernels=(name,))
    return found


def take_fastest_kernel(spec: OperatorSpec, rows: pa.Table) -> pa.Table:
    """Return at each point the rows of the kernel with the lowest median."""
    codes = _whole(rows["kernel"]).indices.to_numpy()
    if not np.ptp(codes):
        return rows
    num_kernels = int(codes.max()) + 1
    points, latency_us = read_points(spec, rows)
    place = find_distinct(points)[1]
    cells, cell = np.unique(place * num_kernels + codes, return_inverse=True)
    median_us = group_medians(cell.reshape(-1), latency_us)
    # The first cell of every place when sorted by place, then by median, is its fastest kernel.
    order = np.lexsort((median_us, cells // num_kernels))
    fastest = order[np.unique((cells // num_kernels)[order], return_index=True)[1]]
    return rows.filter(pa.array(np.isin(cell.reshape(-1), fastest)))


def read_points(spec: OperatorSpec, rows: pa.Table) -> tuple[npt.NDArray[np.int64], FloatColumn]:
    """Return the dimensions of rows, in canonical order, and their times in µs."""
    columns = dims_to_columns(rows, spec.dim_names)
    points = np.stack([columns[name] for name in spec.dim_names], axis=1)
    return points, rows["latency_us"].to_numpy()
