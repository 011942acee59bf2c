"""Compile the inner loops of models: LLVM takes some seconds for them, once on a machine."""

import numpy as np

from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.trainer import train_series

# Sizes of each dimension: as many points as need compiled code to be answered.
_SIZES = (64, 128, 256, 512, 1024)


def compile_loops() -> None:
    """Train a small model and ask it, which compiles the loops or loads what was compiled."""
    names = find_operator("gemm").dim_names
    points = np.stack(np.meshgrid(*[_SIZES] * len(names)), axis=-1).reshape(-1, len(names))
    key = SeriesKey("gemm", "h200_sxm", "", "bf16", "forward", "")
    series = Series(key=key, points=points, latency_us=5.0 + points.prod(axis=1) / 1e6)
    model = train_series(series, PredictorConfig(state_folder=""), seed=0)
    design = series.design
    model.regressor.predict(design, np.full(design.num_rows, Tier.GRID))
    model.floor.floor_us(design.points)
