"""Train on some points of a series, ask for others, and say how far off the answers are."""

from dataclasses import dataclass

import numpy as np

from accuracy.table import Floats, Integers, Mask, take
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.trainer import train_series

CONFIG = PredictorConfig(state_folder="")
# Too few to train on or to judge by.
_MIN_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Errors over the truth, shares from 0 to 1.

    `coverage` is the share of truths inside their nominal 90 % interval, `outside` the share of
    answers that the predictor itself says are extrapolated or analytical.
    """

    mape: float
    p90: float
    coverage: float
    outside: float
    width: float
    num_points: int


def score(truth_us: Floats, estimates: LatencyColumns) -> Score:
    """Compare estimates with what was measured."""
    off = np.abs(estimates.latency_us / truth_us - 1.0)
    is_inside = (estimates.low_us <= truth_us) & (truth_us <= estimates.high_us)
    return Score(
        mape=float(off.mean()),
        p90=float(np.quantile(off, 0.9)),
        coverage=float(is_inside.mean()),
        outside=float((estimates.provenance >= Provenance.EXTRAPOLATED.value).mean()),
        width=float(np.median((estimates.high_us - estimates.low_us) / estimates.latency_us)),
        num_points=len(truth_us),
    )


def can_ask(is_out: Mask) -> bool:
    """Tell whether enough points are left on both sides."""
    return min(int(is_out.sum()), int((~is_out).sum())) >= _MIN_ROWS


def hold_out(series: Series, is_out: Mask, seed: int) -> Score:
    """Train without some points and ask for them."""
    left_out = take(series, is_out)
    return score(left_out.latency_us, estimate(take(series, ~is_out), left_out.points, seed))


def estimate(known: Series, points: Integers, seed: int) -> LatencyColumns:
    """Answer for points as the predictor does that was trained on one series."""
    model = train_series(known, CONFIG, seed)
    models = ModelSet(version="benchmark", series={known.key: model})
    return ask(models, known.key, points)


def ask(
    models: ModelSet, key: SeriesKey, points: Integers, *, is_preferred: bool = False
) -> LatencyColumns:
    """Answer for points under the circumstances of a key; its software is named, or preferred."""
    names = key.spec.dim_names
    table = OperatorTable(
        operator=key.operator,
        dtype=DType[key.dtype.upper()] if key.dtype else DType.FP16,
        phase=Phase[key.phase.upper()],
        columns={name: points[:, place] for place, name in enumerate(names)},
        variant=key.variant,
    )
    query = LatencyQuery(
        device=key.device,
        topology=key.topology,
        framework="" if is_preferred else key.framework,
        preferred_framework=key.framework if is_preferred else "",
        tables=(table,),
    )
    return Estimator(models).predict(query).tables[0]
