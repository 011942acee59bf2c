"""Intervals: how far truth lay from the model on points it had not seen."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.predictor.coverage import Tier
from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn

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


@dataclass(frozen=True, slots=True)
class HeldOutErrors:
    """Log of truth over estimate on held-out points, with their base latency; `fold` by split."""

    error_log: FloatColumn
    base_us: FloatColumn
    fold: npt.NDArray[np.int64]

    @property
    def absolute_ratio(self) -> FloatColumn:
        """Error of the estimate over the truth."""
        return np.abs(np.expm1(-self.error_log))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Bounds in log units around an estimate, by tier (rows) and bin of base latency (columns)."""

    bin_edges_us: FloatColumn
    low_log: Matrix
    high_log: Matrix

    def bounds(
        self, tiers: npt.NDArray[np.int64], base_us: FloatColumn, octaves: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the lower (at most 0) and upper bound of every call.

        Beyond the measured range they grow with the distance to the nearest point.
        """
        bins = np.searchsorted(self.bin_edges_us, base_us, side="right")
        reach = np.where(tiers == Tier.BEYOND, np.maximum(octaves, 1.0), 1.0)
        return self.low_log[tiers, bins] * reach, self.high_log[tiers, bins] * reach


def calibrate(errors: Mapping[Tier, HeldOutErrors]) -> Calibration:
    """Return bounds from held-out errors; a tier without any takes a multiple of the one before."""
    grid = errors.get(Tier.GRID)
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
        if tier in errors:
            found = quantiles(errors[tier].error_log)
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
        rest, own = _select(errors, errors.fold != fold), _select(errors, errors.fold == fold)
        edges = _bin_edges(rest)
        low, high = _binned_quantiles(rest, edges)
        bins = np.searchsorted(edges, own.base_us, side="right")
        is_inside = (own.error_log >= low[bins]) & (own.error_log <= high[bins])
        inside += int(is_inside.sum())
    return inside / len(errors.error_log)


def quantiles(error_log: FloatColumn) -> tuple[float, float]:
    """Return the conformal bounds: with the finite-sample correction, and 0 always inside."""
    share = min(1.0, np.ceil((len(error_log) + 1) * (1.0 - _TAIL)) / len(error_log))
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
        chosen = errors.error_log[bins == index]
        bounds.append(quantiles(chosen if len(chosen) else errors.error_log))
    low, high = zip(*bounds, strict=True)
    return np.array(low), np.array(high)


def _select(errors: HeldOutErrors, chosen: npt.NDArray[np.bool_]) -> HeldOutErrors:
    return HeldOutErrors(errors.error_log[chosen], errors.base_us[chosen], errors.fold[chosen])
