"""From catalog rows to tables: the points of one kernel on one device, and how far repeats lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.series import Series, SeriesKey, build_series
from foretoken.wire.arrow import dims_to_columns

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Between texts of a name, and in none of them.
_BETWEEN = "\x1f"
_IDENTITY = (
    "operator",
    "device",
    "topology",
    "framework",
    "framework_version",
    "kernel",
    "dtype",
    "variant",
    "phase",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTable:
    """The distinct points of a table; `repeat_ratios` is how far second measurements lie off."""

    name: str
    series: Series
    repeat_ratios: Floats

    @property
    def num_points(self) -> int:
        """Distinct points."""
        return len(self.series.points)

    def thin(self, max_points: int, seed: int) -> "MeasuredTable":
        """Return the table with at most so many of its points, drawn by the seed."""
        if self.num_points <= max_points:
            return self
        rows = np.random.default_rng(seed).choice(self.num_points, max_points, replace=False)
        return replace(self, series=take(self.series, np.sort(rows)))


def take(series: Series, rows: Integers | Mask) -> Series:
    """Return some points of a series, in their order."""
    return replace(series, points=series.points[rows], latency_us=series.latency_us[rows])


def split_into_tables(rows: pa.Table, min_points: int) -> Iterator[MeasuredTable]:
    """Yield the tables of one operator's rows, by name; those with too few points are left out.

    The key of a series has no variant and no kernel; here both tell tables apart, so a series never
    mixes them.
    """
    labels = {name: pc.fill_null(rows[name], "") for name in _IDENTITY}
    name = pc.binary_join_element_wise(*labels.values(), _BETWEEN)
    encoded = pc.dictionary_encode(name.combine_chunks())
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(encoded.dictionary) + 1))
    found = zip(encoded.dictionary.to_pylist(), bounds, bounds[1:], strict=False)
    for full_name, start, stop in sorted(found):
        part = rows.take(pa.array(np.sort(order[start:stop])))
        table = _build_table(full_name.split(_BETWEEN), part)
        if table.num_points >= min_points:
            yield table


def _build_table(identity: Sequence[str], rows: pa.Table) -> MeasuredTable:
    said = dict(zip(_IDENTITY, identity, strict=True))
    spec = find_operator(said["operator"])
    key = SeriesKey(
        operator=spec.name,
        device=said["device"],
        topology=said["topology"] if spec.is_collective else "",
        dtype="" if spec.is_collective else said["dtype"],
        phase=said["phase"],
        framework=f"{said['framework']} {said['framework_version']}".strip(),
    )
    points, latency_us = read_points(rows)
    return MeasuredTable(
        name=" ".join(text for text in identity if text),
        series=build_series(key, points, latency_us),
        repeat_ratios=_compare_repeats(points, latency_us),
    )


def read_points(rows: pa.Table) -> tuple[Integers, Floats]:
    """Return the dimensions, in canonical order, and times of rows of one operator."""
    names = find_operator(rows["operator"][0].as_py()).dim_names
    columns = dims_to_columns(rows, names)
    latency = pc.coalesce(rows["latency_us_median"], rows["latency_us_mean"])
    return np.stack([columns[name] for name in names], axis=1), latency.to_numpy()


def _compare_repeats(points: Integers, latency_us: Floats) -> Floats:
    """Return by how much the second measurement of a point is off the first, where there are two.

    Rows are in the order they were imported in, so first and second are no choice of ours.
    """
    _, inverse, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    first = np.cumsum(counts) - counts
    first = first[counts > 1]
    return np.asarray(np.abs(latency_us[order[first + 1]] / latency_us[order[first]] - 1.0))
