"""Train the model of one series, and measure it on points left out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import (
    FEATURE_REVISION,
    Design,
    Matrix,
    feature_names,
)
from foretoken.predictor.held_out import report_errors, to_errors
from foretoken.predictor.intervals.calibration import Calibration, calibrate
from foretoken.predictor.intervals.coverage import CoverageMap, Tier, map_coverage
from foretoken.predictor.intervals.holdout import thin_rows
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.regression.cross_validation import (
    Answers,
    CrossValidation,
    Heartbeat,
    Part,
    Unseen,
    no_heartbeat,
)
from foretoken.predictor.regression.curves import fit_curve_regressor, has_curves
from foretoken.predictor.regression.member import NAMES, STEPS, MemberFitter
from foretoken.predictor.regression.mixture import learn_shares
from foretoken.predictor.regression.monotone import MonotoneFloor, build_floor, learn_floor
from foretoken.predictor.regression.prediction import Regressor
from foretoken.predictor.regression.series_regressor import SeriesRegressor, spread
from foretoken.predictor.roofline import FloatColumn, IntColumn
from foretoken.predictor.training_rows import Series, SeriesHead

# The share of the roofline no modelled estimate goes below. Real calls do go below the roofline
# itself where their data fit the second-level cache, so a series that was measured even lower
# lowers it. Source: ingest flags what is faster than half the roofline.
MIN_ROOFLINE_RATIO = 0.5


@dataclass(frozen=True, kw_only=True)
class SeriesModel:
    """Everything needed to answer for one series, and how well it does."""

    series: Series
    regressor: Regressor
    calibration: Calibration
    min_roofline_ratio: float
    floor_slack_ratio: float
    content_hash: str
    report: OperatorTrainingReport

    @property
    def head(self) -> SeriesHead:
        """What is known without loading it."""
        return self.series.head(self.content_hash)

    @cached_property
    def index(self) -> PointIndex:
        """The points, to be looked up."""
        return PointIndex(self.series.points)

    @cached_property
    def coverage(self) -> CoverageMap:
        """Where the points lie."""
        return map_coverage(self.series.key.spec, self.series.points, self.series.axes)

    @cached_property
    def floor(self) -> MonotoneFloor:
        """What the points say that calls beyond them take at least."""
        series = self.series
        return build_floor(
            series.key.spec, series.points, series.latency_us, self.floor_slack_ratio
        )


def train_series(
    series: Series, config: PredictorConfig, seed: int, heartbeat: Heartbeat = no_heartbeat
) -> SeriesModel:
    """Train on all points; the folds that measure it train models of their own.

    `heartbeat` is called before every fold; what it raises ends the training.
    """
    spec = series.key.spec
    design = series.design
    log_ratio = np.log(series.latency_us / design.base_us)
    # All points serve as neighbours; of many, some tell the rest.
    sample = thin_rows(np.arange(design.num_rows), config.max_rows, np.random.default_rng(seed))
    validation = CrossValidation(spec, design.take(sample), log_ratio[sample], seed, heartbeat)
    if has_curves(spec):
        trained = _train_curves(validation, design, log_ratio)
    else:
        trained = _train_members(validation, MemberFitter(config, seed, design, log_ratio, sample))
    errors = to_errors(trained.unseen, trained.shares)
    with np.errstate(divide="ignore"):
        roofline_ratio = np.min(series.latency_us / design.roofline_us)
    return SeriesModel(
        series=series,
        regressor=trained.regressor,
        calibration=calibrate(errors),
        min_roofline_ratio=float(min(MIN_ROOFLINE_RATIO, roofline_ratio)),
        floor_slack_ratio=learn_floor(spec, series.points, series.latency_us).slack_ratio,
        content_hash=hash_training(series, config, seed),
        report=report_errors(
            series.key, len(series.points), trained.unseen, errors, trained.member_weights
        ),
    )


def refit_regressor(
    regressor: Regressor, part: Series, config: PredictorConfig, seed: int
) -> Regressor:
    """Return what a series' regressor would be of some of its points, mixed as it is."""
    if not isinstance(regressor, SeriesRegressor):
        return train_series(part, config, seed).regressor
    design, shares = part.design, regressor.shares
    log_ratio = np.log(part.latency_us / design.base_us)
    fitter = MemberFitter(config, seed, design, log_ratio, np.arange(design.num_rows))
    members = fitter.fit(has_steps=bool(shares[:, STEPS].any())).settle()
    return SeriesRegressor(members, shares)


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


@dataclass(frozen=True, slots=True)
class _Trained:
    """A regressor, and what its members said of points left out."""

    regressor: Regressor
    unseen: Sequence[Unseen]
    shares: Matrix
    member_names: tuple[str, ...]

    @property
    def member_weights(self) -> dict[str, float]:
        """Share of each member in the answers inside the grid."""
        return dict(zip(self.member_names, self.shares[Tier.GRID].tolist(), strict=True))


def _train_curves(validation: CrossValidation, design: Design, log_ratio: FloatColumn) -> _Trained:
    def ask(known: Part, asked: Part, tiers: IntColumn) -> Answers:
        trained = fit_curve_regressor(known.design, validation.log_ratio[known.rows])
        prediction = trained.predict(asked.design, tiers)
        return prediction.log_ratio[:, None], prediction.spread_log

    regressor = fit_curve_regressor(design, log_ratio)
    unseen = list(validation.leave_out(ask))
    return _Trained(regressor, unseen, np.ones((len(Tier), 1)), ("curves",))


def _train_members(validation: CrossValidation, fitter: MemberFitter) -> _Trained:
    def ask(known: Part, asked: Part, _tiers: IntColumn) -> Answers:
        answers, deviation_log = fitter.ask_part(known, asked)
        return answers, spread(answers, deviation_log)

    unseen = list(validation.leave_out(ask))
    shares = learn_shares(unseen, len(NAMES))
    has_steps = bool(shares[:, STEPS].any())
    members = fitter.fit(has_steps=has_steps).settle()
    return _Trained(SeriesRegressor(members, shares), unseen, shares, NAMES)
