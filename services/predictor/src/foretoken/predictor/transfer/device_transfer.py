"""The model of a series with few points, which borrows from other devices what it cannot know."""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.regression.cross_validation import Heartbeat, no_heartbeat
from foretoken.predictor.regression.prediction import Prediction, Regressor, RegressorState
from foretoken.predictor.roofline import IntColumn
from foretoken.predictor.series import Series
from foretoken.predictor.trainer import (
    SeriesModel,
    hash_training,
    refit_regressor,
    train_series,
)
from foretoken.predictor.transfer.pool import DonorPool
from foretoken.predictor.transfer.pooled_model import PooledModel

# A series with more points, or whose own model errs less on points left out, gains under a
# twentieth of its error: not worth the time.
_MAX_ROWS, _GOOD_ERROR_RATIO, _MIN_HELD_OUT = 1_000, 0.04, 60
# Own and pooled models err apart, so that in the long run halves are best; with so few points the
# own one has half of that. Source: GEMM of four devices with 20, 50, 100 and 1,000 points.
_OWN_SHARE, _HALF_SHARE_ROWS = 0.5, 30.0
# Another share must err less by this part on points left out, over the root of their number: few
# of them tell little.
_MIN_GAIN = 2.0
_NUM_FOLDS, _MIN_ROWS = 3, 9
_CANDIDATE_SHARES = np.linspace(0.0, 1.0, 11)

_OWN, _POOLED, _SHARE = "own:", "pooled:", "own_share"

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class DeviceTransferRegressor:
    """The weighted mean of a series' own model and of one pooled over devices."""

    own: Regressor
    pooled: PooledModel
    own_share: float

    @property
    def basis(self) -> str:
        """In words, what the answer rests on."""
        return self.pooled.basis

    def predict(self, design: Design, tiers: IntColumn) -> Prediction:
        """Return the prediction of every call; its spread is that of the own model."""
        own = self.own.predict(design, tiers)
        pooled_log = self.pooled.log_ratio(design)
        log_ratio = self.own_share * own.log_ratio + (1.0 - self.own_share) * pooled_log
        return Prediction(log_ratio, own.spread_log, {**own.members, "other devices": pooled_log})

    def to_state(self) -> RegressorState:
        """Return both parts' states, distinguished by the beginnings of their names."""
        own, pooled = self.own.to_state(), self.pooled.to_state()
        return RegressorState(
            arrays={**_prefix(_OWN, own.arrays), **_prefix(_POOLED, pooled.arrays)},
            numbers={
                **_prefix(_OWN, own.numbers),
                **_prefix(_POOLED, pooled.numbers),
                _SHARE: self.own_share,
            },
        )


def is_device_transfer(state: RegressorState) -> bool:
    """Tell whether a state is that of a borrowing regressor."""
    return _SHARE in state.numbers


def own_state(state: RegressorState) -> RegressorState:
    """Return the state of the own model of a borrowing regressor."""
    return _strip(_OWN, state)


def restore(own: Regressor, state: RegressorState) -> Regressor:
    """Return the regressor that gave the state; `own` is made of its `own_state`.

    Where an earlier release learned what is borrowed, the own model answers alone.
    """
    pooled = PooledModel.from_state(_strip(_POOLED, state))
    return DeviceTransferRegressor(own, pooled, state.numbers[_SHARE]) if pooled else own


def may_transfer(series: Series) -> bool:
    """Tell whether a series has so few points that others can help it."""
    return _MIN_ROWS <= len(series.points) <= _MAX_ROWS


def hash_transfer(
    series: Series, pool: DonorPool | None, config: PredictorConfig, seed: int
) -> str:
    """Return the identity of a training: its rows, features, parameters, and what it may borrow."""
    own_hash = hash_training(series, config, seed)
    if pool is None or not may_transfer(series):
        return own_hash
    return hashlib.sha256(f"{own_hash} {pool.content_hash}".encode()).hexdigest()


def train_transfer_series(
    series: Series,
    pool: DonorPool | None,
    config: PredictorConfig,
    seed: int,
    heartbeat: Heartbeat = no_heartbeat,
) -> SeriesModel:
    """Train the series' own model and, where it may gain, the pooled one as well.

    Bounds are those of the own model, on points it had not seen: with few points rather too wide.
    """
    own = train_series(series, config, seed, heartbeat)
    if pool is None or not may_transfer(series):
        return own
    own = dataclasses.replace(own, content_hash=hash_transfer(series, pool, config, seed))
    is_told = own.report.num_held_out >= _MIN_HELD_OUT
    if is_told and own.report.held_out_mape_ratio < _GOOD_ERROR_RATIO:
        return own
    share = _learn_share(own, pool, config, seed)
    pooled = _fit(pool, series, config, seed)
    return dataclasses.replace(own, regressor=DeviceTransferRegressor(own.regressor, pooled, share))


def _learn_share(own: SeriesModel, pool: DonorPool, config: PredictorConfig, seed: int) -> float:
    """Return the own model's share that errs least on points left out."""
    series = own.series
    design = series.design
    num_rows = design.num_rows
    truth_log = np.log(series.latency_us / design.base_us)
    own_log, pooled_log = np.empty(num_rows), np.empty(num_rows)
    fold = np.random.default_rng(seed).permutation(num_rows) % _NUM_FOLDS
    for index in range(_NUM_FOLDS):
        is_out = fold == index
        known = series.take(~is_out)
        asked = design.take(np.flatnonzero(is_out))
        tiers = np.full(asked.num_rows, int(Tier.GRID))
        part = refit_regressor(own.regressor, known, config, seed)
        own_log[is_out] = part.predict(asked, tiers).log_ratio
        pooled_log[is_out] = _fit(pool, known, config, seed).log_ratio(asked)

    def error(share: float) -> float:
        mixed_log = share * own_log + (1.0 - share) * pooled_log
        return float(np.abs(mixed_log - truth_log).mean())

    usual = _OWN_SHARE * num_rows / (num_rows + _HALF_SHARE_ROWS)
    best = float(min(_CANDIDATE_SHARES, key=error))
    min_gain = _MIN_GAIN / np.sqrt(num_rows)
    return best if error(best) < (1.0 - min_gain) * error(usual) else usual


def _fit(pool: DonorPool, series: Series, config: PredictorConfig, seed: int) -> PooledModel:
    design = series.design
    return pool.fit(design, np.log(series.latency_us / design.base_us), config, seed)


def _prefix(beginning: str, parts: Mapping[str, _Part]) -> dict[str, _Part]:
    return {beginning + name: part for name, part in parts.items()}


def _strip(beginning: str, state: RegressorState) -> RegressorState:
    return RegressorState(
        arrays=_pick(beginning, state.arrays),
        numbers=_pick(beginning, state.numbers),
    )


def _pick(beginning: str, parts: Mapping[str, _Part]) -> dict[str, _Part]:
    return {
        name.removeprefix(beginning): part
        for name, part in parts.items()
        if name.startswith(beginning)
    }
