"""Series: the points of one operator under one set of circumstances."""

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.predictor.features import Design, Matrix, build_axes, build_design
from foretoken.predictor.roofline import Columns, FloatColumn, IntColumn, Target

# Bits of the mantissa of a latency in single precision that say nothing: 14 of 23 are kept.
_DROPPED_BITS = 9
# The largest number that a row's dimensions are packed into.
_MAX_CODE = 2**63 - 1


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
    def names(self) -> tuple[str, ...]:
        """All of it in order, as it is stored."""
        where = (self.operator, self.device, self.topology)
        return (*where, self.dtype, self.phase, self.framework, self.variant, self.kernel)

    @property
    def circumstances(self) -> "SeriesKey":
        """The same of whichever software and kernel."""
        where = (self.operator, self.device, self.topology)
        return SeriesKey(*where, self.dtype, self.phase, "", self.variant)

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
        digest = hashlib.sha256(repr((self.key.names, self.kernels)).encode())
        digest.update(np.ascontiguousarray(self.points).tobytes())
        digest.update(np.ascontiguousarray(self.latency_us).tobytes())
        return digest.hexdigest()


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
    median_us = group_medians(inverse, latency_us)
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


def group_medians(group: npt.NDArray[np.int64], values: FloatColumn) -> FloatColumn:
    """Return the median of every group; groups are numbered from 0 without gaps."""
    order = np.lexsort((values, group))
    counts = np.bincount(group)
    starts = np.cumsum(counts) - counts
    ordered = values[order]
    # The median of a sorted run is the mean of its one or two middle values.
    return np.asarray(0.5 * (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]))
