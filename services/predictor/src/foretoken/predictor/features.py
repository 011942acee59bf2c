"""What a latency model sees of an operator call: the roofline's view first, then the shape."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.domain.operators.spec.operator import FeatureFormula, OperatorSpec, dim_axes
from foretoken.domain.units import US_PER_S
from foretoken.predictor.roofline import (
    Columns,
    FloatColumn,
    Limits,
    Target,
    as_reals,
    compute_limits,
)

Matrix = npt.NDArray[np.float64]

# Part of every model's version: raise it when a feature or the calibration changes its meaning.
FEATURE_REVISION = 6

# Dimensions that a model's architecture, its sharding or the machine fixes; the others change from
# step to step. A new combination of these is predicted worse than a new size of a known one.
CONFIGURATION_DIMS = frozenset(
    {
        "n",
        "k",
        "hidden",
        "vocab",
        "intermediate",
        "num_heads",
        "num_kv_heads",
        "num_k_heads",
        "num_v_heads",
        "head_dim",
        "channels",
        "top_k",
        "num_experts",
        "devices_per_node",
        "num_nodes",
    }
)

# How many columns of a design's work the roofline gives; the operator's own follow.
NUM_ROOFLINE_PARTS = 4

_TINY_US = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """A table of calls as the models take it.

    `points` are the dimensions in canonical order, integers; `log_points` their log2(1 + x), the
    space in which coverage is judged; `axes` the same of the axes that one sweeps. `work` holds
    quantities, none negative, that latency may grow in proportion to. `features` feed the trees,
    `transfer` holds the dimensionless columns that mean the same on every device. Times in µs.
    """

    points: npt.NDArray[np.int64]
    log_points: Matrix
    axes: Matrix
    work: Matrix
    features: Matrix
    transfer: Matrix
    roofline_us: FloatColumn
    base_us: FloatColumn

    @property
    def num_rows(self) -> int:
        """Number of calls."""
        return len(self.base_us)

    @property
    def memory_us(self) -> FloatColumn:
        """What memory, or the links of a collective, take for the bytes of every call."""
        return self.work[:, NUM_ROOFLINE_PARTS - 1]

    def take(self, rows: npt.NDArray[np.int64]) -> "Design":
        """Return the design of some of the calls."""
        return Design(
            points=self.points[rows],
            log_points=self.log_points[rows],
            axes=self.axes[rows],
            work=self.work[rows],
            features=self.features[rows],
            transfer=self.transfer[rows],
            roofline_us=self.roofline_us[rows],
            base_us=self.base_us[rows],
        )


def feature_names(spec: OperatorSpec) -> tuple[str, ...]:
    """Return the names of the feature columns."""
    logs = tuple(f"log2_{name}" for name in (*spec.dim_names, *spec.features))
    return (*logs, "log_compute_us", "log_memory_us", "log_balance", "log_base_us")


def build_design(spec: OperatorSpec, columns: Columns, target: Target) -> Design:
    """Return the design of a table; columns are integers of equal length, checked before."""
    limits = compute_limits(spec, columns, target)
    points = np.stack([columns[name] for name in spec.dim_names], axis=1)
    # Products of dimensions need not fit 64-bit integers.
    columns_real = as_reals(columns)
    num_sms = target.device.num_sms
    log_points = np.log2(1.0 + points)
    base_us = limits.base_us
    log_compute = np.log(limits.compute_us + _TINY_US)
    log_memory = np.log(limits.memory_us + _TINY_US)
    work = (log_compute, log_memory, log_compute - log_memory, np.log(base_us))
    shape = np.log2(1.0 + _evaluate(spec.features, columns_real, num_sms))
    features = np.column_stack([log_points, shape, *work])
    return Design(
        points=points,
        log_points=log_points,
        axes=build_axes(spec, columns, target),
        work=_work_columns(spec, columns_real, num_sms, limits),
        features=features,
        transfer=_transfer_columns(spec, columns, target, limits),
        roofline_us=limits.roofline_us,
        base_us=base_us,
    )


def build_axes(spec: OperatorSpec, columns: Columns, target: Target) -> Matrix:
    """Return the axes of a design alone."""
    axes = spec.axes or dim_axes(*spec.dim_names)
    return np.log2(1.0 + _evaluate(axes, as_reals(columns), target.device.num_sms))


def _work_columns(
    spec: OperatorSpec, columns: Mapping[str, FloatColumn], num_sms: int, limits: Limits
) -> Matrix:
    costs = spec.costs or dim_axes(*spec.dim_names)
    base = (limits.base_us, limits.floor_us, limits.compute_us, limits.memory_us)
    return np.column_stack([*base, _evaluate(costs, columns, num_sms)])


def _evaluate(
    formulas: Mapping[str, FeatureFormula], columns: Mapping[str, FloatColumn], num_sms: int
) -> Matrix:
    """Return one column per formula, none negative; a plug-in's may divide by an empty dim."""
    found = np.empty((len(next(iter(columns.values()))), len(formulas)))
    with np.errstate(all="ignore"):
        for place, formula in enumerate(formulas.values()):
            found[:, place] = formula(columns, num_sms)
    if not np.isfinite(found).all():
        np.nan_to_num(found, copy=False)
    return np.maximum(found, 0.0, out=found)


def _transfer_columns(
    spec: OperatorSpec, columns: Columns, target: Target, limits: Limits
) -> Matrix:
    """Return three columns: roofline over floor, and two that say which limit binds and where."""
    over_floor = np.log(limits.roofline_us / limits.floor_us + _TINY_US)
    if spec.is_collective:
        return np.column_stack(
            [over_floor, np.log2(columns["devices_per_node"]), np.log2(columns["num_nodes"])]
        )
    balance = np.log((limits.compute_us + _TINY_US) / (limits.memory_us + _TINY_US))
    moved_bytes = limits.memory_us * target.device.memory_bandwidth_bytes_per_s / US_PER_S
    over_cache = np.log((moved_bytes + 1.0) / target.device.l2_cache_bytes)
    return np.column_stack([over_floor, balance, over_cache])
