"""The model of a series as bytes: a line of JSON and plain arrays.

What only repeats other series, or is rarely asked for, may be packed as its points alone: it is
trained from them when it is first asked for.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.domain import schema
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.features import FEATURE_REVISION
from foretoken.predictor.intervals.calibration import Calibration
from foretoken.predictor.packing import Arrays, pack, unpack
from foretoken.predictor.regression.cross_validation import Heartbeat
from foretoken.predictor.regression.curves import CurveRegressor, has_curves
from foretoken.predictor.regression.prediction import Regressor, RegressorState
from foretoken.predictor.regression.series_regressor import SeriesRegressor
from foretoken.predictor.series import Series, SeriesHead
from foretoken.predictor.trainer import SeriesModel, train_series, training_recipe
from foretoken.predictor.transfer.device_transfer import is_device_transfer, own_state, restore

# Raised when what is written changes; features have a revision of their own.
_FORMAT_REVISION = 5
STORE_REVISION = [_FORMAT_REVISION, FEATURE_REVISION]


def pack_model(model: SeriesModel) -> bytes:
    """Return the model of a series as its member."""
    series, calibration, state = model.series, model.calibration, model.regressor.to_state()
    meta = {
        "noise_log": series.noise_log,
        "min_roofline_ratio": model.min_roofline_ratio,
        "floor_slack_ratio": model.floor_slack_ratio,
        "spread_power": calibration.spread_power,
        "numbers": dict(state.numbers),
        "report": schema.encode(model.report),
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        **_write_points(series),
        "bin_edges_us": calibration.bin_edges_us,
        "bin_ratio": calibration.bin_ratio,
        "tier_log": calibration.tier_log,
        **{f"regressor:{name}": array for name, array in state.arrays.items()},
    }
    return pack(meta, arrays)


def pack_points(series: Series, config: PredictorConfig, seed: int) -> bytes:
    """Return a series as a member without a model, and how that is to be trained."""
    meta = {"noise_log": series.noise_log, "recipe": training_recipe(config, seed)}
    return pack(meta, _write_points(series))


def has_model(content: bytes) -> bool:
    """Tell whether a member has a model, or only the points it is to be trained on."""
    return "recipe" not in unpack(content)[0]


def train_points(head: SeriesHead, content: bytes, heartbeat: Heartbeat) -> SeriesModel:
    """Return the model of a member that has none."""
    meta, arrays = unpack(content)
    recipe = dict(meta["recipe"])
    seed = recipe.pop("seed")
    booster = BoosterConfig(**recipe.pop("booster"))
    config = PredictorConfig(state_folder="", booster=booster, **recipe)
    return train_series(_read_points(head, meta, arrays), config, seed, heartbeat)


def unpack_points(head: SeriesHead, content: bytes) -> Series:
    """Return the points of a member, without its model."""
    return _read_points(head, *unpack(content))


def unpack_report(content: bytes) -> OperatorTrainingReport:
    """Return how good the model of a member is."""
    return schema.decode(OperatorTrainingReport, unpack(content)[0]["report"])


def unpack_model(head: SeriesHead, content: bytes) -> SeriesModel:
    """Return the model of a series from its member."""
    meta, arrays = unpack(content)
    series = _read_points(head, meta, arrays)
    bins = arrays["bin_edges_us"], arrays["bin_ratio"]
    return SeriesModel(
        series=series,
        regressor=_read_regressor(series, meta, arrays),
        calibration=Calibration(*bins, meta["spread_power"], arrays["tier_log"]),
        min_roofline_ratio=meta["min_roofline_ratio"],
        floor_slack_ratio=meta["floor_slack_ratio"],
        content_hash=head.content_hash,
        report=schema.decode(OperatorTrainingReport, meta["report"]),
    )


def _write_points(series: Series) -> Arrays:
    return {
        # Column by column, in order: what repeats packs well.
        "points": np.ascontiguousarray(_narrow(series.points).T),
        "latency_us": series.latency_us.astype(np.float32),
    }


def _read_points(head: SeriesHead, meta: Mapping[str, Any], arrays: Arrays) -> Series:
    return Series(
        key=head.key,
        points=np.ascontiguousarray(arrays["points"].T, dtype=np.int64),
        latency_us=arrays["latency_us"].astype(np.float64),
        noise_log=meta["noise_log"],
        kernels=head.kernels,
    )


def _read_regressor(series: Series, meta: Mapping[str, Any], arrays: Arrays) -> Regressor:
    own = {
        name.partition(":")[2]: array
        for name, array in arrays.items()
        if name.startswith("regressor:")
    }
    state = RegressorState(own, meta["numbers"])
    if has_curves(series.key.spec):
        return CurveRegressor.from_state(state)
    design = series.design
    log_ratio = np.log(series.latency_us / design.base_us)
    if not is_device_transfer(state):
        return SeriesRegressor.from_state(state, design, log_ratio)
    return restore(SeriesRegressor.from_state(own_state(state), design, log_ratio), state)


def _narrow(points: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return integers in the fewest bytes that hold them."""
    return points.astype(np.min_scalar_type(int(points.max(initial=0))))
