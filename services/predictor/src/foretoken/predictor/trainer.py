"""Train the model of one series, and measure it on points left out."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from foretoken.predictor.calibration import (
    Calibration,
    HeldOutErrors,
    calibrate,
    held_out_coverage,
)
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.coverage import CoverageMap, Tier, map_coverage
from foretoken.predictor.curves import fit_curve_regressor, has_curves
from foretoken.predictor.features import FEATURE_REVISION, Design, build_design, feature_names
from foretoken.predictor.holdout import Split, split_beyond, split_configurations, split_sizes
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.regressor import Regressor, fit_tree_regressor, predict_log_ratio
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.training_rows import Series

# The share of the roofline no modelled estimate goes below. Real calls do go below the roofline
# itself where their data fit the second-level cache, so a series that was measured even lower
# lowers it. Source: ingest flags what is faster than half the roofline.
MIN_ROOFLINE_RATIO = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """How a model did on whole sizes left out; all 0 where too few points could be."""

    num_held_out: int = 0
    mape_ratio: float = 0.0
    p90_ratio: float = 0.0
    interval_coverage_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesModel:
    """Everything needed to answer for one series, and how well it does."""

    series: Series
    regressor: Regressor
    index: PointIndex
    coverage: CoverageMap
    calibration: Calibration
    min_roofline_ratio: float
    content_hash: str
    score: HeldOutScore


def train_series(series: Series, config: PredictorConfig, seed: int) -> SeriesModel:
    """Train on all points; the folds that measure it train models of their own."""
    spec = series.key.spec
    design = build_design(spec, series.columns, series.key.target)
    log_ratio = np.log(series.latency_us / design.base_us)
    fit = _fitter(series, config, seed)
    splits: dict[Tier, Iterable[Split]] = {
        Tier.GRID: split_sizes(spec, series.points, seed),
        Tier.NEW_CONFIGURATION: split_configurations(spec, series.points, seed),
        Tier.BEYOND: split_beyond(spec, series.points),
    }
    found = {tier: _held_out_errors(fit, design, log_ratio, ways) for tier, ways in splits.items()}
    errors = {tier: error for tier, error in found.items() if error is not None}
    with np.errstate(divide="ignore"):
        roofline_ratio = np.min(series.latency_us / design.roofline_us)
    return SeriesModel(
        series=series,
        regressor=fit(design, log_ratio),
        index=PointIndex(series.points),
        coverage=map_coverage(spec, series.points),
        calibration=calibrate(errors),
        min_roofline_ratio=float(min(MIN_ROOFLINE_RATIO, roofline_ratio)),
        content_hash=hash_training(series, config, seed),
        score=_score(errors.get(Tier.GRID)),
    )


def hash_training(series: Series, config: PredictorConfig, seed: int) -> str:
    """Return the identity of a training: its rows, features and parameters."""
    parameters = {
        "booster": asdict(config.booster),
        "min_rows": config.min_rows,
        "max_rows": config.max_rows,
        "seed": seed,
        "feature_revision": FEATURE_REVISION,
        "features": feature_names(series.key.spec),
        "rows": series.content_hash,
        "noise_log": series.noise_log,
    }
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


Fitter = Callable[[Design, FloatColumn], Regressor]


def _fitter(series: Series, config: PredictorConfig, seed: int) -> Fitter:
    if has_curves(series.key.spec):
        return fit_curve_regressor
    return lambda design, log_ratio: fit_tree_regressor(design, log_ratio, config, seed)


def _held_out_errors(
    fit: Fitter, design: Design, log_ratio: FloatColumn, splits: Iterable[Split]
) -> HeldOutErrors | None:
    parts: list[HeldOutErrors] = []
    for fold, (inside, outside) in enumerate(splits):
        known, asked = design.take(inside), design.take(outside)
        regressor = fit(known, log_ratio[inside])
        neighbours = PointIndex(known.points).find(asked)
        error_log = log_ratio[outside] - predict_log_ratio(regressor, asked, neighbours)
        parts.append(HeldOutErrors(error_log, asked.base_us, np.full(len(outside), fold)))
    if not parts:
        return None
    return HeldOutErrors(
        np.concatenate([part.error_log for part in parts]),
        np.concatenate([part.base_us for part in parts]),
        np.concatenate([part.fold for part in parts]),
    )


def _score(errors: HeldOutErrors | None) -> HeldOutScore:
    if errors is None:
        return HeldOutScore()
    ratio = errors.absolute_ratio
    return HeldOutScore(
        num_held_out=len(ratio),
        mape_ratio=float(ratio.mean()),
        p90_ratio=float(np.quantile(ratio, 0.9)),
        interval_coverage_ratio=held_out_coverage(errors),
    )
