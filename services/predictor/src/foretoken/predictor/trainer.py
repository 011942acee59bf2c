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
    join_errors,
)
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.coverage import CoverageMap, map_coverage
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
    fit = _fitter(series, config, seed)
    sizes = _held_out_errors(series, design, fit, split_sizes(spec, series.points, seed))
    others = (split_configurations(spec, series.points, seed), split_beyond(spec, series.points))
    found = (sizes, *(_held_out_errors(series, design, fit, splits) for splits in others))
    errors = [error for error in found if error is not None]
    with np.errstate(divide="ignore"):
        roofline_ratio = np.min(series.latency_us / design.roofline_us)
    return SeriesModel(
        series=series,
        regressor=fit(design, _log_ratio(series, design)),
        index=PointIndex(series.points),
        coverage=map_coverage(spec, series.points),
        calibration=calibrate(join_errors(errors) if errors else None),
        min_roofline_ratio=float(min(MIN_ROOFLINE_RATIO, roofline_ratio)),
        content_hash=hash_training(series, config, seed),
        score=_score(sizes),
    )


def _log_ratio(series: Series, design: Design) -> FloatColumn:
    return np.log(series.latency_us / design.base_us)


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
    series: Series, design: Design, fit: Fitter, splits: Iterable[Split]
) -> HeldOutErrors | None:
    log_ratio = _log_ratio(series, design)
    parts: list[HeldOutErrors] = []
    for split in splits:
        known, asked = design.take(split.inside), design.take(split.outside)
        regressor = fit(known, log_ratio[split.inside])
        neighbours = PointIndex(known.points).find(asked)
        estimate_log = predict_log_ratio(regressor, asked, neighbours)
        # What lies beyond the points that are left is no fair test of what lies between them.
        tier = map_coverage(series.key.spec, known.points).tiers(asked, neighbours)
        parts.append(
            HeldOutErrors(
                error_log=log_ratio[split.outside] - estimate_log,
                base_us=asked.base_us,
                octaves=neighbours.distance_octaves,
                tier=tier,
                group=split.group,
                fold=np.zeros(len(tier), dtype=np.int64),
            )
        )
    return join_errors(parts) if parts else None


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
