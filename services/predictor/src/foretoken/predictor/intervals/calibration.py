"""Intervals: how far truth lay from the model on points it had not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Share of truths that should fall inside the interval.
_NOMINAL = 0.9
# The standard deviations that hold that share of a normal distribution.
_NORMAL = 1.645
# A bound is a quantile of the errors, or where groups are too few for that a multiple of the worst.
_QUANTILES = np.linspace(_NOMINAL, 1.0, 11)
_MULTIPLES = np.array([1.25, 1.6, 2.0, 2.5, 3.2])
# Groups beyond as many are left out several at a time, which changes nothing but the cost.
_MAX_FOLDS = 20
# With fewer errors, or one group of them, a tier takes a multiple of the grid's bounds.
_MIN_ERRORS = 4

# Small calls are noisier than large ones: errors are binned by base latency where each bin still
# has enough of them.
_NUM_BINS = 3
_MIN_BIN_ROWS = 100
# Bounds grow with a regressor's own spread to one of these powers, whichever is sharpest.
_SPREAD_POWERS = (0.0, 0.5, 1.0)

# What to assume where nothing could be held out, or not of a tier. Source: in profiles of five
# devices 90 % of sizes left out are within 10 %, here taken twice; of 150 series of all kinds of
# operators, a quarter errs by more than these multiples of it in the harder tiers.
_DEFAULT_GRID_LOG = 0.2
_DEFAULT_FACTORS = {
    Tier.GAP: 2.0,
    Tier.NEW_CONFIGURATION: 2.5,
    Tier.BEYOND: 3.0,
    Tier.FAR_CONFIGURATION: 4.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutErrors:
    """Log of truth over estimate on held-out points, one value per point in every column.

    `spread_log`, `tier` and `octaves` are what the predictor would say of the point. Points of one
    `group` (a size or configuration left out together) err together. `fold` tells the splits apart.
    """

    error_log: FloatColumn
    spread_log: FloatColumn
    base_us: FloatColumn
    octaves: FloatColumn
    tier: IntColumn
    group: IntColumn
    fold: IntColumn

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
    """Half-widths in log units around an estimate, in units of a call's own uncertainty.

    `tier_log` has one per tier; a call's uncertainty is its spread to `spread_power`, times
    `bin_ratio` of its bin of base latency.
    """

    bin_edges_us: FloatColumn
    bin_ratio: FloatColumn
    spread_power: float
    tier_log: FloatColumn

    def bounds(
        self,
        tiers: IntColumn,
        spread_log: FloatColumn,
        base_us: FloatColumn,
        octaves: FloatColumn,
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the lower and upper bound of every call, in log units around the estimate.

        More than an octave from all points they grow with the distance to the nearest.
        """
        width_log = self.tier_log[tiers] * self.doubt(spread_log, base_us, octaves)
        # Of configurations unlike all others the held-out ones say little: what the regressor says
        # of itself is the least.
        is_far = tiers == Tier.FAR_CONFIGURATION
        width_log = np.where(is_far, np.maximum(width_log, _NORMAL * spread_log), width_log)
        return -width_log, width_log

    def doubt(
        self, spread_log: FloatColumn, base_us: FloatColumn, octaves: FloatColumn
    ) -> FloatColumn:
        """Return how uncertain every call is against others of its tier."""
        bins = np.searchsorted(self.bin_edges_us, base_us, side="right")
        reach = np.maximum(octaves, 1.0)
        return np.asarray(spread_log**self.spread_power * self.bin_ratio[bins] * reach)


def calibrate(errors: HeldOutErrors | None) -> Calibration:
    """Return bounds from held-out errors; a tier without enough takes a multiple of the grid's."""
    tier_log = np.full(len(Tier), _DEFAULT_GRID_LOG)
    for tier, factor in _DEFAULT_FACTORS.items():
        tier_log[tier] *= factor
    if errors is None:
        return Calibration(np.empty(0), np.ones(1), 0.0, tier_log)
    shape = _shape_of_doubt(errors)
    scores = np.abs(errors.error_log) / _doubt(shape, errors)
    grid = _half_width(scores, errors, Tier.GRID)
    if grid is None:
        # Nothing between neighbours was held out: what is known is about harder questions.
        grid = _DEFAULT_GRID_LOG / float(np.median(errors.spread_log)) ** shape.spread_power
    tier_log[Tier.GRID] = grid
    for tier, factor in _DEFAULT_FACTORS.items():
        found = _half_width(scores, errors, tier)
        # No tier is surer than the grid, which extrapolates least.
        if found is None:
            # A spread that singles out uncertain calls knows part of it already.
            found = grid * factor ** (1.0 - shape.spread_power / 2.0)
        tier_log[tier] = max(found, grid)
    return Calibration(shape.bin_edges_us, shape.bin_ratio, shape.spread_power, tier_log)


def held_out_bounds(errors: HeldOutErrors) -> FloatColumn:
    """Return half-widths around held-out points in log units, calibrated on the other folds."""
    width_log = np.empty(len(errors.error_log))
    for fold in np.unique(errors.fold):
        is_own = errors.fold == fold
        own, others = errors.take(is_own), errors.take(~is_own)
        calibration = calibrate(others if len(others.error_log) else None)
        bounds = calibration.bounds(own.tier, own.spread_log, own.base_us, own.octaves)
        width_log[is_own] = bounds[1]
    return width_log


def half_width(scores: FloatColumn, group: IntColumn) -> float:
    """Return the bound that holds the nominal share of the points of groups left out.

    Errors of one group are alike, so groups are left out whole: of all quantiles and multiples of
    the worst, the least that would have held enough of the points of groups it was not taken from.

    Source: cross-conformal prediction (Vovk, 2015) over groups; see also Lee, Barber and Willett,
    Distribution-free inference with hierarchical data (2023).
    """
    order = np.argsort(scores)
    codes, scores = (np.unique(group, return_inverse=True)[1] % _MAX_FOLDS)[order], scores[order]
    num_inside = np.zeros(len(_QUANTILES) + len(_MULTIPLES))
    for code in range(int(codes.max()) + 1):
        own = codes == code
        if not own.all():
            num_inside += np.searchsorted(scores[own], _candidates(scores[~own]), side="right")
    is_enough = num_inside >= _NOMINAL * len(scores)
    best = int(np.argmax(is_enough)) if is_enough.any() else len(is_enough) - 1
    return float(_candidates(scores)[best])


def quantiles(error_log: FloatColumn, group: IntColumn) -> tuple[float, float]:
    """Return bounds on either side for a point of a new group; 0 is always inside.

    Errors of one group are alike, so groups count, not points, in the correction for a finite
    sample: of them and one more, the new one, that may lie anywhere. Unequal groups count as fewer
    equal ones. Groups too few to show the tail give the worst error seen.

    Source: Lee, Barber and Willett, Distribution-free inference with hierarchical data (2023), with
    points weighed alike and Kish's effective number of groups (Survey Sampling, 1965, section 8.2).
    """
    _, counts = np.unique(group, return_counts=True)
    num_groups = counts.sum() ** 2 / (counts**2).sum()
    share = min(1.0, (1.0 - (1.0 - _NOMINAL) / 2.0) * (num_groups + 1.0) / num_groups)
    low = float(np.quantile(error_log, 1.0 - share, method="lower"))
    high = float(np.quantile(error_log, share, method="higher"))
    return min(low, 0.0), max(high, 0.0)


def _candidates(scores: FloatColumn) -> FloatColumn:
    """Return the bounds to choose from, of scores from the least to the worst."""
    quantiles = scores[np.ceil(_QUANTILES * (len(scores) - 1)).astype(np.int64)]
    return np.concatenate([quantiles, quantiles[-1] * _MULTIPLES])


def _half_width(scores: FloatColumn, errors: HeldOutErrors, tier: Tier) -> float | None:
    chosen = errors.tier == tier
    if chosen.sum() < _MIN_ERRORS or len(np.unique(errors.group[chosen])) == 1:
        return None
    return half_width(scores[chosen], errors.group[chosen])


def _shape_of_doubt(errors: HeldOutErrors) -> Calibration:
    """Choose how uncertainty depends on spread and base latency, on the grid if it has points."""
    on_grid = errors.take(errors.tier == Tier.GRID)
    if len(on_grid.error_log) < _MIN_ERRORS:
        on_grid = errors
    shapes = [_bin(on_grid, power) for power in _SPREAD_POWERS]
    return min(shapes, key=lambda shape: _mean_log_width(shape, on_grid))


def _bin(errors: HeldOutErrors, power: float) -> Calibration:
    """Return a calibration with the ratio of each bin's errors to those of all."""
    unit = np.ones(len(Tier))
    plain = Calibration(np.empty(0), np.ones(1), power, unit)
    num_bins = min(_NUM_BINS, len(errors.base_us) // _MIN_BIN_ROWS)
    if num_bins < 2:  # noqa: PLR2004
        return plain
    scores = np.abs(errors.error_log) / _doubt(plain, errors)
    edges = np.quantile(errors.base_us, np.arange(1, num_bins) / num_bins)
    bins = np.searchsorted(edges, errors.base_us, side="right")
    whole = np.quantile(scores, _NOMINAL)
    ratios = [
        np.quantile(scores[bins == index], _NOMINAL) if (bins == index).any() else whole
        for index in range(num_bins)
    ]
    # Where a model is exact, ratios say nothing.
    return Calibration(edges, np.array(ratios) / whole, power, unit) if min(ratios) > 0 else plain


def _doubt(shape: Calibration, errors: HeldOutErrors) -> FloatColumn:
    return shape.doubt(errors.spread_log, errors.base_us, errors.octaves)


def _mean_log_width(shape: Calibration, errors: HeldOutErrors) -> float:
    doubt = _doubt(shape, errors)
    widest = float(np.quantile(np.abs(errors.error_log) / doubt, _NOMINAL))
    if not widest:
        return 0.0
    # A difference of less than a hundredth is chance.
    return round(float(np.log(widest) + np.log(doubt).mean()), 2)
