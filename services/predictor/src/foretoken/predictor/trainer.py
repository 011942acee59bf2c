"""Train the model of one series, and measure it on points left out."""

import hashlib
import json
import math
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
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.intervals.holdout import thin_rows
from foretoken.predictor.reach import Reach
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
from foretoken.predictor.series import Series, SeriesHead
from foretoken.predictor.tuning import Tuning

# The share of the roofline no modelled estimate goes below. Real calls do go below the roofline
# itself where their data fit the second-level cache, so a series that was measured even lower
# lowers it. Source: ingest flags what is faster than half the roofline.
MIN_ROOFLINE_RATIO = 0.5
# How far apart two measurements of one point lie where a series cannot tell for itself, and the
# least that is ever claimed. Source: 90th percentile of repeated points, 1.4 to 3.4 %; vLLM's 0.22
# and 0.24 on an H200, what changes smoothly between them taken out, differ by 1.8 % (attention), 2
# (experts) and 3 (products) on average, of which the 3.4 make 2.3.
_NOISE_LOG, _MIN_NOISE_LOG = 0.034, 0.014
# Of a normal error: how many standard deviations 90 % are within, and the deviation over the mean.
_NORMAL, _MEAN_TO_DEVIATION = 1.645, math.sqrt(math.pi / 2.0)
# A model is never surer of a measured point than its measurement is.
_LEAST_MEASURED_SHARE = 0.5


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

    @property
    def noise_log(self) -> float:
        """Within which 90 % of further measurements of a point lie of one, in log units."""
        own_log = self.series.noise_log
        return max(own_log, _MIN_NOISE_LOG) if own_log else _NOISE_LOG

    @property
    def measured_share(self) -> float:
        """The share of a point's own measurement in its estimate, by inverse variances.

        The variance of points left out is the model's and the measurement's, added.
        """
        if not self.report.num_held_out:
            return 1.0
        noise = self.noise_log / _NORMAL
        deviation = max(_MEAN_TO_DEVIATION * self.report.held_out_mape_ratio, noise)
        return max(1.0 - (noise / deviation) ** 2, _LEAST_MEASURED_SHARE)

    @cached_property
    def reach(self) -> Reach:
        """Where the points lie."""
        return Reach(self.series)

    @cached_property
    def floor(self) -> MonotoneFloor:
        """What the points say that calls beyond them take at least."""
        series = self.series
        return build_floor(
            series.key.spec, series.points, series.latency_us, self.floor_slack_ratio
        )


def train_series(
    series: Series,
    config: PredictorConfig,
    seed: int,
    heartbeat: Heartbeat = no_heartbeat,
    tuning: Tuning | None = None,
) -> SeriesModel:
    """Train on all points; the folds that measure it train models of their own.

    `heartbeat` is called before every fold; what it raises ends the training. With a `tuning`, as
    an earlier training of the same points has learned it, there are no folds.
    """
    spec = series.key.spec
    design = series.design
    log_ratio = np.log(series.latency_us / design.base_us)
    # All points serve as neighbours; of many, some tell the rest.
    sample = thin_rows(np.arange(design.num_rows), config.max_rows, np.random.default_rng(seed))
    if tuning is not None:
        fitter = MemberFitter(config, seed, design, log_ratio, sample, tuning.scales)
        trained = _train_tuned(series, fitter, tuning)
    else:
        part = design.take(sample)
        validation = CrossValidation(spec, part, log_ratio[sample], seed, heartbeat)
        if has_curves(spec):
            trained = _train_curves(series, validation, design, log_ratio)
        else:
            fitter = MemberFitter(config, seed, design, log_ratio, sample)
            trained = _train_members(series, validation, fitter)
    with np.errstate(divide="ignore"):
        roofline_ratio = np.min(series.latency_us / design.roofline_us)
    return SeriesModel(
        series=series,
        regressor=trained.regressor,
        calibration=trained.calibration,
        min_roofline_ratio=float(min(MIN_ROOFLINE_RATIO, roofline_ratio)),
        floor_slack_ratio=learn_floor(spec, series.points, series.latency_us).slack_ratio,
        content_hash=hash_training(series, config, seed),
        report=trained.report,
    )


def tune(model: SeriesModel) -> Tuning:
    """Return what a training of members has learned by leaving points out.

    Raises:
        TypeError: the model has no members.

    """
    regressor, report = model.regressor, model.report
    if not isinstance(regressor, SeriesRegressor):
        raise TypeError(f"{type(regressor).__name__} has no members")
    return Tuning(
        shares=regressor.shares,
        scales=regressor.members.kriging.scales,
        calibration=model.calibration,
        num_held_out=report.num_held_out,
        errors=(
            report.held_out_mape_ratio,
            report.held_out_p90_ratio,
            report.interval_coverage_ratio,
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
    return _mix_members(fitter, shares)


def training_recipe(config: PredictorConfig, seed: int) -> dict[str, object]:
    """Return the parameters on which a training depends, as JSON has them."""
    return {
        "booster": asdict(config.booster),
        "min_rows": config.min_rows,
        "max_rows": config.max_rows,
        "seed": seed,
    }


def hash_training(series: Series, config: PredictorConfig, seed: int) -> str:
    """Return the identity of a training: its rows, features and parameters."""
    parameters = {
        **training_recipe(config, seed),
        "feature_revision": FEATURE_REVISION,
        "features": feature_names(series.key.spec),
        "rows": series.content_hash,
        "noise_log": series.noise_log,
    }
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Trained:
    """A regressor, and how far it is off."""

    regressor: Regressor
    calibration: Calibration
    report: OperatorTrainingReport


def _train_curves(
    series: Series, validation: CrossValidation, design: Design, log_ratio: FloatColumn
) -> _Trained:
    def ask(known: Part, asked: Part, tiers: IntColumn) -> Answers:
        trained = fit_curve_regressor(known.design, validation.log_ratio[known.rows])
        prediction = trained.predict(asked.design, tiers)
        return prediction.log_ratio[:, None], prediction.spread_log

    regressor = fit_curve_regressor(design, log_ratio)
    unseen = list(validation.leave_out(ask))
    return _judge(series, regressor, unseen, _Mixture(np.ones((len(Tier), 1)), ("curves",)))


def _train_members(series: Series, validation: CrossValidation, fitter: MemberFitter) -> _Trained:
    def ask(known: Part, asked: Part, _tiers: IntColumn) -> Answers:
        answers, deviation_log = fitter.ask_part(known, asked)
        return answers, spread(answers, deviation_log)

    unseen = list(validation.leave_out(ask))
    mixture = _Mixture(learn_shares(unseen, len(NAMES)), NAMES)
    return _judge(series, _mix_members(fitter, mixture.shares), unseen, mixture)


def _train_tuned(series: Series, fitter: MemberFitter, tuning: Tuning) -> _Trained:
    regressor = _mix_members(fitter, tuning.shares)
    return _Trained(regressor, tuning.calibration, tuning.report(series.key, series.num_points))


def _mix_members(fitter: MemberFitter, shares: Matrix) -> SeriesRegressor:
    """Return the regressor of all points; steps are trained where they have a share."""
    has_steps = bool(shares[:, STEPS].any())
    return SeriesRegressor(fitter.fit(has_steps=has_steps).settle(), shares)


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The shares of members by name (columns) by tier (rows)."""

    shares: Matrix
    names: tuple[str, ...]


def _judge(
    series: Series, regressor: Regressor, unseen: Sequence[Unseen], mixture: _Mixture
) -> _Trained:
    """Return a regressor with what its members said of points left out."""
    errors = to_errors(unseen, mixture.shares)
    # In the answers inside the grid.
    weights = dict(zip(mixture.names, mixture.shares[Tier.GRID].tolist(), strict=True))
    report = report_errors(series.key, series.num_points, unseen, errors, weights)
    return _Trained(regressor, calibrate(errors), report)
