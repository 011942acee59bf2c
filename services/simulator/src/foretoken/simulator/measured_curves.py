"""Measured points of an operator, put together to curves, and what the predictor says of them.

A curve is the points that differ in one dimension alone: the message of a collective within a group
of devices, the first dimension (tokens) of any other operator.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.domain.units import US_PER_S
from foretoken.simulator.latency_source import LatencySource

_Floats = NDArray[np.float64]
_NUM_FITTED = 61
_MESSAGE = "message_bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveKey:
    """What the points of a curve have in common; `fixed` are their other dimensions."""

    operator: str
    device: str
    topology: str
    dtype: str
    phase: str
    variant: str
    fixed: tuple[tuple[str, int], ...]

    @property
    def spec(self) -> OperatorSpec:
        """The operator."""
        return find_operator(self.operator)

    @property
    def moving(self) -> str:
        """The dimension in which points differ."""
        return moving_dim(self.spec)

    @property
    def title(self) -> str:
        """What a panel is called."""
        fixed = dict(self.fixed)
        if self.spec.is_collective:
            per_node, nodes = fixed["devices_per_node"], fixed["num_nodes"]
            name = f"{per_node} x {nodes} node{'s' if nodes > 1 else ''}"
        else:
            order = [dim for dim in self.spec.dim_names if dim in fixed]
            name = " ".join(f"{dim}={fixed[dim]:,}" for dim in order)
        words = [name, self.dtype, self.variant, "" if self.phase == "forward" else self.phase]
        return ", ".join(word for word in words if word)

    @property
    def has_flops(self) -> bool:
        """Whether its rate is of FLOP, not of bytes."""
        ones = dict.fromkeys(self.spec.dim_names, 1)
        return not self.spec.is_collective and bool(self.spec.flops(ones, 2.0) > 0)

    def dims(self, sizes: _Floats) -> dict[str, Any]:
        """Return the dimensions of points at these sizes, as columns."""
        whole = np.asarray(sizes, dtype=np.int64)
        columns = {name: np.full(len(whole), size) for name, size in self.fixed}
        columns[self.moving] = whole
        return {name: columns[name] for name in self.spec.dim_names}

    @property
    def unit(self) -> str:
        """The unit of its rates."""
        return "TFLOP/s" if self.has_flops else "GB/s"

    def rates(self, sizes: _Floats, latency_us: _Floats) -> _Floats:
        """Return what is achieved per second: FLOP, bytes of a message, or bytes moved."""
        return self.work(sizes) / (latency_us / US_PER_S) / (1e12 if self.has_flops else 1e9)

    def work(self, sizes: _Floats) -> _Floats:
        """Return the FLOP of points, of collectives the message, else the bytes moved."""
        if self.spec.is_collective:
            return np.asarray(sizes, dtype=np.float64)
        element_bytes = DType[self.dtype.upper()].num_bytes
        dims = self.dims(sizes)
        formula = self.spec.flops if self.has_flops else self.spec.moved_bytes
        ratio = self.spec.work_ratio(Phase[self.phase.upper()])
        return np.asarray(formula(dims, element_bytes), dtype=np.float64) * ratio


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredCurve:
    """Points in the order of their sizes: the middle time of those measured more than once."""

    key: CurveKey
    sizes: _Floats
    latency_us: _Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedCurve:
    """What the predictor says between a curve's first point and its last, and at its points.

    `provenance` names what most of it rests on.
    """

    measured: MeasuredCurve
    sizes: _Floats
    latency_us: _Floats
    low_us: _Floats
    high_us: _Floats
    at_points_us: _Floats
    provenance: str

    @property
    def error_ratio(self) -> _Floats:
        """How far the fit is from each point: its estimate over the measurement, less one."""
        return self.at_points_us / self.measured.latency_us - 1


def moving_dim(spec: OperatorSpec) -> str:
    """Return the dimension along which an operator is drawn."""
    return _MESSAGE if spec.is_collective else spec.dim_names[0]


def read_curves(rows: pa.Table) -> list[MeasuredCurve]:
    """Return the curves of rows of the catalog, those with the most points first."""
    points: defaultdict[CurveKey, defaultdict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    names = ("operator", "device", "topology", "dtype", "phase", "variant")
    columns = [rows.column(name).to_pylist() for name in (*names, "dims", "latency_us_median")]
    for *words, dims, latency_us in zip(*columns, strict=True):
        if latency_us is None:
            continue
        sizes = dict(dims)
        moving = moving_dim(find_operator(words[0]))
        if moving not in sizes:
            continue
        size = sizes.pop(moving)
        said = dict(zip(names, (word or "" for word in words), strict=True))
        key = CurveKey(**said, fixed=tuple(sorted(sizes.items())))
        points[key][size].append(latency_us)
    curves = [_curve(key, found) for key, found in points.items()]
    return sorted(curves, key=lambda curve: (-len(curve.sizes), _order(curve.key)))


def fit_curves(
    curves: Sequence[MeasuredCurve], predictor: LatencySource, framework: str = ""
) -> list[FittedCurve]:
    """Return what the predictor says of each curve; it is asked once for each device and topology.

    Raises:
        UnknownDeviceError: no such device.
        UnknownTopologyError: no such topology.

    """
    by_place: defaultdict[tuple[str, str], list[MeasuredCurve]] = defaultdict(list)
    for curve in curves:
        by_place[curve.key.device, curve.key.topology].append(curve)
    found: dict[int, FittedCurve] = {}
    for (device, topology), members in by_place.items():
        grids = [_grid(curve.sizes) for curve in members]
        query = LatencyQuery(
            device=device,
            topology=topology,
            preferred_framework=framework,
            tables=tuple(
                _table(curve.key, np.concatenate([grid, curve.sizes]))
                for curve, grid in zip(members, grids, strict=True)
            ),
        )
        reply = predictor.predict(query)
        for curve, grid, columns in zip(members, grids, reply.tables, strict=True):
            times = (columns.latency_us, columns.low_us, columns.high_us)
            latency, low, high = (np.asarray(times_us, dtype=np.float64) for times_us in times)
            end = len(grid)
            found[id(curve)] = FittedCurve(
                measured=curve,
                sizes=grid,
                latency_us=latency[:end],
                low_us=low[:end],
                high_us=high[:end],
                at_points_us=latency[end:],
                provenance=_provenance(np.asarray(columns.provenance)[:end]),
            )
    return [found[id(curve)] for curve in curves]


def _order(key: CurveKey) -> tuple[object, ...]:
    return key.operator, key.device, key.topology, key.dtype, key.phase, key.variant, key.fixed


def _curve(key: CurveKey, found: Mapping[int, Sequence[float]]) -> MeasuredCurve:
    sizes = sorted(found)
    return MeasuredCurve(
        key=key,
        sizes=np.array(sizes, dtype=np.float64),
        latency_us=np.array([float(np.median(found[size])) for size in sizes]),
    )


def _grid(sizes: _Floats) -> _Floats:
    """Return whole sizes from the least to the largest, evenly on a logarithmic axis."""
    return np.unique(np.round(np.geomspace(max(1.0, sizes[0]), sizes[-1], _NUM_FITTED)))


def _table(key: CurveKey, sizes: _Floats) -> OperatorTable:
    return OperatorTable(
        operator=key.operator,
        dtype=DType[key.dtype.upper()],
        phase=Phase[key.phase.upper()],
        columns=key.dims(sizes),
        variant=key.variant,
    )


def _provenance(values: NDArray[np.int64]) -> str:
    kinds, counts = np.unique(values, return_counts=True)
    return Provenance(int(kinds[counts.argmax()])).name.lower()
