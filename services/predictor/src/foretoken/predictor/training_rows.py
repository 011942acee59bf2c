"""From catalog rows to series: the points of one operator under one set of circumstances."""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.domain.errors import UnknownDeviceError, UnknownTopologyError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.operators.spec.operator import OperatorSpec, all_operators, find_operator
from foretoken.domain.operators.spec.overlap import is_of_overlap
from foretoken.predictor.features import Design, Matrix, build_axes, build_design
from foretoken.predictor.roofline import Columns, FloatColumn, IntColumn, Target
from foretoken.predictor.sustained import to_burst_us
from foretoken.wire.arrow import dims_to_columns, open_stream

_log = logging.getLogger(__name__)

_GROUP_COLUMNS = ("operator", "device", "topology", "dtype", "phase", "framework", "variant")
# Bits of the mantissa of a latency in single precision that say nothing: 14 of 23 are kept.
_DROPPED_BITS = 9
# The largest number that a row's dimensions are packed into.
_MAX_CODE = 2**63 - 1
# A kernel that was measured at fewer points of a series is not asked for by name.
_MIN_KERNEL_POINTS = 8


@dataclass(frozen=True, order=True, slots=True)
class SeriesKey:
    """Circumstances of a series; `framework` is name and version, empty for all together.

    A collective has a topology, and no dtype: only its bytes count. `variant` is empty for the
    plain case, `kernel` for the fastest kernel at each point.
    """

    operator: str
    device: str
    topology: str
    dtype: str
    phase: str
    framework: str
    variant: str = ""
    kernel: str = ""

    @property
    def spec(self) -> OperatorSpec:
        """The operator."""
        return find_operator(self.operator)

    @property
    def target(self) -> Target:
        """What the calls ran on.

        Raises:
            UnknownDeviceError: no such device file.
            UnknownTopologyError: no such topology file.

        """
        topology = find_topology(self.topology) if self.topology else None
        dtype = DType[self.dtype.upper()] if self.dtype else DType.BF16
        device = find_device(self.device)
        return Target(
            device=device, dtype=dtype, phase=Phase[self.phase.upper()], topology=topology
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesHead:
    """What is known of a series and its model without loading them.

    `content_hash` is the identity of the training: rows, features, parameters. `origin` names a
    catalog that is not the predictor's own.
    """

    key: SeriesKey
    kernels: tuple[str, ...]
    num_points: int
    content_hash: str
    origin: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Distinct points in a canonical order, each with the median of its measurements.

    `noise_log` is the 90th percentile, in log units, of how far one more measurement of a point
    would lie from its median, by another framework where several are united; 0 where no point was
    measured twice. `kernels` are those of its rows, also of rows that count in another series.
    """

    key: SeriesKey
    points: npt.NDArray[np.int64]
    latency_us: FloatColumn
    noise_log: float = 0.0
    kernels: tuple[str, ...] = ()

    @property
    def columns(self) -> Columns:
        """The points as columns by dimension."""
        names = self.key.spec.dim_names
        return {name: self.points[:, index] for index, name in enumerate(names)}

    @property
    def design(self) -> Design:
        """The points as models take them, worked out anew."""
        return build_design(self.key.spec, self.columns, self.key.target)

    @property
    def axes(self) -> Matrix:
        """The axes of the design, worked out without the rest of it."""
        return build_axes(self.key.spec, self.columns, self.key.target)

    @property
    def num_points(self) -> int:
        """Number of distinct points."""
        return len(self.points)

    def head(self, content_hash: str) -> SeriesHead:
        """Return what is known of a model of that identity without loading it."""
        return SeriesHead(
            key=self.key,
            kernels=self.kernels,
            num_points=self.num_points,
            content_hash=content_hash,
        )

    def take(self, rows: npt.NDArray[Any]) -> "Series":
        """Return the series of some of the points."""
        return dataclasses.replace(self, points=self.points[rows], latency_us=self.latency_us[rows])

    @property
    def content_hash(self) -> str:
        """Identity of the circumstances and every point."""
        digest = hashlib.sha256(repr((dataclasses.astuple(self.key), self.kernels)).encode())
        digest.update(np.ascontiguousarray(self.points).tobytes())
        digest.update(np.ascontiguousarray(self.latency_us).tobytes())
        return digest.hexdigest()


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
    groups: dict[SeriesKey, list[pa.Table]] = {}
    for key, rows in group_rows(table):
        groups.setdefault(key, []).append(rows)
    series: dict[SeriesKey, Series] = {}
    for key, parts in groups.items():
        rows = pa.concat_tables(parts)
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


def unite_series(key: SeriesKey, members: Iterable[Series]) -> Series:
    """Return the points of several frameworks, each as one of them measured it.

    Where they share a point, the one with the most points counts: what is in between two
    frameworks, nobody measured. How far the others are from it is part of the noise.
    """
    ranked = sorted(members, key=lambda item: (-len(item.points), item.key.framework))
    all_points = np.concatenate([item.points for item in ranked])
    first, place = find_distinct(all_points)
    all_us = np.concatenate([item.latency_us for item in ranked])
    latency_us = all_us[first]
    is_other = np.ones(len(all_us), dtype=bool)
    is_other[first] = False
    apart = np.abs(np.log(all_us / latency_us[place]))[is_other]
    noises = [item.noise_log for item in ranked]
    if len(apart):
        noises.append(float(np.quantile(apart, 0.9)))
    return Series(
        key=key,
        points=all_points[first],
        latency_us=latency_us,
        noise_log=max(noises),
        kernels=tuple(sorted({name for item in ranked for name in item.kernels})),
    )


def build_series(key: SeriesKey, points: npt.NDArray[np.int64], latency_us: FloatColumn) -> Series:
    """Return the series of rows that may repeat points, in any order."""
    first, inverse = find_distinct(points)
    counts = np.bincount(inverse)
    median_us = _medians(inverse, latency_us)
    is_repeated = counts[inverse] > 1
    repeats = counts[inverse][is_repeated]
    # The median of few lies nearer to each of them than to a new measurement: scale for that.
    deviation = np.abs(np.log(latency_us / median_us[inverse]))[is_repeated]
    deviation *= np.sqrt((repeats + 1) / (repeats - 1))
    noise_log = float(np.quantile(deviation, 0.9)) if len(deviation) else 0.0
    latency_us = round_latency(median_us)
    return Series(key=key, points=points[first], latency_us=latency_us, noise_log=noise_log)


def find_distinct(points: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Return the first row of every distinct point, in ascending order, and which one each row is.

    Dimensions are not negative.
    """
    codes = np.zeros(len(points), dtype=np.int64)
    for column in points.T:
        # One number a row, in the order of rows; made small again before it overflows.
        size = int(column.max(initial=0)) + 1
        if size * (int(codes.max(initial=0)) + 1) > _MAX_CODE:
            codes = np.unique(codes, return_inverse=True)[1]
            column = np.unique(column, return_inverse=True)[1]  # noqa: PLW2901
            size = int(column.max(initial=0)) + 1
        codes = codes * size + column
    _, first, place = np.unique(codes, return_index=True, return_inverse=True)
    return first, place


def round_latency(latency_us: FloatColumn, dropped_bits: int = _DROPPED_BITS) -> FloatColumn:
    """Return latencies with a bit of noise less, in half the bytes, within 31 in a million.

    `dropped_bits` are those of the mantissa in single precision that say nothing: each one more
    doubles the error.
    """
    bits = latency_us.astype(np.float32).view(np.uint32) + np.uint32(1 << dropped_bits - 1)
    return (bits >> dropped_bits << dropped_bits).view(np.float32).astype(np.float64)


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
    # What has a mean power was timed for about a second, which others were not.
    has_power = pc.fill_null(pc.greater(table["power_w"], 0.0), fill_value=False)
    columns |= {"framework": named, "latency_us": latency, "is_sustained": has_power}
    variant = columns["variant"]
    is_disturbed = np.array([is_of_overlap(name) for name in variant.dictionary.to_pylist()], bool)
    is_alone = pa.array(~is_disturbed[variant.indices.to_numpy()])
    return pa.table(columns).filter(pc.fill_null(pc.and_(is_usable, is_alone), fill_value=False))


def _encode(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return texts by their number among the distinct ones; null is the empty text."""
    coded = _whole(column).dictionary_encode(null_encoding="encode")
    names = pa.array([name or "" for name in coded.dictionary.to_pylist()], pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, names)


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


def group_rows(table: pa.Table) -> Iterable[tuple[SeriesKey, pa.Table]]:
    """Yield the usable rows of each set of circumstances that has operator and device files."""
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
    median_us = _medians(cell.reshape(-1), latency_us)
    # The first cell of every place when sorted by place, then by median, is its fastest kernel.
    order = np.lexsort((median_us, cells // num_kernels))
    fastest = order[np.unique((cells // num_kernels)[order], return_index=True)[1]]
    return rows.filter(pa.array(np.isin(cell.reshape(-1), fastest)))


def read_points(spec: OperatorSpec, rows: pa.Table) -> tuple[npt.NDArray[np.int64], FloatColumn]:
    """Return the dimensions of rows, in canonical order, and their times in µs."""
    columns = dims_to_columns(rows, spec.dim_names)
    points = np.stack([columns[name] for name in spec.dim_names], axis=1)
    return points, rows["latency_us"].to_numpy()


def _medians(group: npt.NDArray[np.int64], values: FloatColumn) -> FloatColumn:
    """Return the median of every group; groups are numbered from 0 without gaps."""
    order = np.lexsort((values, group))
    counts = np.bincount(group)
    starts = np.cumsum(counts) - counts
    ordered = values[order]
    # The median of a sorted run is the mean of its one or two middle values.
    return np.asarray(0.5 * (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]))
