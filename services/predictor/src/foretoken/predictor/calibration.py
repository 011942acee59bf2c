"""Intervals: how far truth lay from the model on points it had not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.predictor.coverage import Tier
from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Share of truths that should fall on either side outside the interval: nominal 90 % inside.
_TAIL = 0.05
# Small calls are noisier than large ones: errors are binned by base latency where each bin still
# has enough of them.
_NUM_BINS = 3
_MIN_BIN_ROWS = 40

# What to assume where nothing could be held out. Source: held-out errors of the operators of the
# A30, A100, H100, RTX 4090 and RTX PRO 6000 profiles: 90 % within 10 % on sizes left out; errors
# on configurations left out 3 to 5 times, beyond the range 2 times those.
_DEFAULT_GRID_LOG = 0.2
_NEW_CONFIGURATION_FACTOR = 4.0
_BEYOND_FACTOR = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutErrors:
    """Log of truth over estimate on held-out points, one value per point in every column.

    `tier` and `octaves` are what the predictor would say of the point. Points of one `group` (a
    size or configuration left out together) err together. `fold` tells the splits apart.
    """

    error_log: FloatColumn
    base_us: FloatColumn
    octaves: FloatColumn
    tier: IntColumn
    group: IntColumn
    fold: IntColumn

    @property
    def absolute_ratio(self) -> FloatColumn:
        """Error of the estimate over the truth."""
        return np.abs(np.expm1(-self.error_log))

    @property
    def error_log_per_reach(self) -> FloatColumn:
        """Errors in units of the distance that bounds grow with."""
        return self.error_log / _reach(self.tier, self.octaves)

    def take(self, chosen: npt.NDArray[np.bool_]) -> "HeldOutErrors":
        """Return some of the points."""
        return HeldOutErrors(
            **{field.name: getattr(self, field.name)[chosen] for field in fields(self)}
        )


def join_errors(parts: Sequence[HeldOutErrors]) -> HeldOutErrors:
    """Return all points together; groups and folds of different parts stay apart."""
    columns: dict[str, list[npt.NDArray[Any]]] = {field.name: [] for field in fields(HeldOutErrors)}
    shifts = {"group": 0, "fold": 0}
    for part in parts:
        for name, found in columns.items():
            column = getattr(part, name)
            found.append(column + shifts.get(name, 0))
        for name in shifts:
            shifts[name] += int(getattr(part, name).max(initial=0)) + 1
    return HeldOutErrors(**{name: np.concatenate(found) for name, found in columns.items()})


@dataclass(frozen=True, slots=True)
class Calibration:
    """Bounds in log units around an estimate, by tier (rows) and bin of base latency (columns)."""

    bin_edges_us: FloatColumn
    low_log: Matrix
    high_log: Matrix

    def bounds(
        self, tiers: IntColumn, base_us: FloatColumn, octaves: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the lower (at most 0) and upper bound of every call.

        Beyond the measured range they grow with the distance to the nearest point.
        """
        bins = np.searchsorted(self.bin_edges_us, base_us, side="right")
        reach = _reach(tiers, octaves)
        return self.low_log[tiers, bins] * reach, self.high_log[tiers, bins] * reach


def _reach(tiers: IntColumn, octaves: FloatColumn) -> FloatColumn:
    return np.where(tiers == Tier.BEYOND, np.maximum(octaves, 1.0), 1.0)


def calibrate(errors: HeldOutErrors | None) -> Calibration:
    """Return bounds from held-out errors; a tier without any takes a multiple of the one before."""
    by_tier: dict[Tier, HeldOutErrors] = {}
    if errors is not None:
        present = (Tier(tier) for tier in np.unique(errors.tier).tolist())
        by_tier = {tier: errors.take(errors.tier == tier) for tier in present}
    grid = by_tier.get(Tier.GRID)
    edges = _bin_edges(grid)
    low = np.full((len(Tier), len(edges) + 1), -_DEFAULT_GRID_LOG)
    high = -low
    if grid is not None:
        low[Tier.GRID], high[Tier.GRID] = _binned_quantiles(grid, edges)
    for tier, factor in (
        (Tier.NEW_CONFIGURATION, _NEW_CONFIGURATION_FACTOR),
        (Tier.BEYOND, _BEYOND_FACTOR),
    ):
        before = Tier(tier - 1)
        if tier in by_tier:
            found = quantiles(by_tier[tier].error_log_per_reach, by_tier[tier].group)
            # A tier is never surer than the one that asks less.
            low[tier] = np.minimum(found[0], low[before])
            high[tier] = np.maximum(found[1], high[before])
        else:
            low[tier], high[tier] = low[before] * factor, high[before] * factor
    return Calibration(edges, low, high)


def held_out_coverage(errors: HeldOutErrors) -> float:
    """Return the share of held-out truths inside intervals calibrated on the other splits."""
    inside = 0
    folds = np.unique(errors.fold)
    if len(folds) < 2:  # noqa: PLR2004
        return 0.0
    for fold in folds:
        own = errors.take(errors.fold == fold)
        calibration = calibrate(errors.take(errors.fold != fold))
        low, high = calibration.bounds(own.tier, own.base_us, own.octaves)
        inside += int(((own.error_log >= low) & (own.error_log <= high)).sum())
    return inside / len(errors.error_log)


def quantiles(error_log: FloatColumn, group: IntColumn) -> tuple[float, float]:
    """Return the conformal bounds for a point of a new group; 0 is always inside.

    Errors of one group are alike, so groups count, not points, in the correction for a finite
    sample: of them and one more, the new one, that may lie anywhere. Unequal groups count as fewer
    equal ones. Groups too few to show the tail give the worst error seen.

    Source: Lee, Barber and Willett, Distribution-free inference with hierarchical data (2023), with
    points weighed alike and Kish's effective number of groups (Survey Sampling, 1965, section 8.2).
    """
    _, counts = np.unique(group, return_counts=True)
    num_groups = counts.sum() ** 2 / (counts**2).sum()
    share = min(1.0, (1.0 - _TAIL) * (num_groups + 1.0) / num_groups)
    low = float(np.quantile(error_log, 1.0 - share, method="lower"))
    high = float(np.quantile(error_log, share, method="higher"))
    return min(low, 0.0), max(high, 0.0)


def _bin_edges(errors: HeldOutErrors | None) -> FloatColumn:
    if errors is None or len(errors.base_us) < _NUM_BINS * _MIN_BIN_ROWS:
        return np.empty(0)
    return np.quantile(errors.base_us, np.arange(1, _NUM_BINS) / _NUM_BINS)


def _binned_quantiles(errors: HeldOutErrors, edges: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
    bins = np.searchsorted(edges, errors.base_us, side="right")
    bounds = []
    for index in range(len(edges) + 1):
        chosen = errors.take(bins == index) if (bins == index).any() else errors
        bounds.append(quantiles(chosen.error_log, chosen.group))
    low, high = zip(*bounds, strict=True)
    return np.array(low), np.array(high)
