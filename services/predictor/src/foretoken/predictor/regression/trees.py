"""Trees with linear leaves over the features, by LightGBM."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.features import Matrix
from foretoken.predictor.regression.tree_engine import TreeEngine, build_engine
from foretoken.predictor.roofline import FloatColumn

if TYPE_CHECKING:
    import lightgbm

_log = logging.getLogger(__name__)

# Up to so many rows LightGBM itself answers: a process that requests little compiles nothing.
_MAX_FEW_ROWS = 16
# The engine is compared with LightGBM on so many rows when it is made, and may be so far off.
_NUM_COMPARED, _MAX_APART = 64, 1e-9
# However few the rows.
_MIN_TREES = 10


@dataclass(frozen=True)
class Trees:
    """A LightGBM model, or a constant where there are too few rows for trees.

    `text` is LightGBM's own format, `booster` the model as trained; both are empty for a constant,
    and only one is there before and after it was settled. Answers stay between `low` and `high`:
    lines in leaves go on where data end.
    """

    constant: float
    text: str
    booster: lightgbm.Booster | None
    num_threads: int = 1
    low: float = -np.inf
    high: float = np.inf

    @classmethod
    def load(
        cls,
        text: str,
        constant: float,
        num_threads: int,
        bounds: tuple[float, float] = (-np.inf, np.inf),
    ) -> Trees:
        """Return the model from its text, which is read when first needed."""
        return cls(constant, text, None, num_threads, *bounds)

    def settle(self) -> Trees:
        """Return the model as it is after a restart: with its text, and read from that."""
        if self.booster is None:
            return self
        text = self.booster.model_to_string()
        return Trees.load(text, self.constant, self.num_threads, (self.low, self.high))

    def predict(self, features: Matrix) -> FloatColumn:
        """Return one value per row; features are finite."""
        if self.booster is None and not self.text:
            return np.full(len(features), self.constant)
        if len(features) > _MAX_FEW_ROWS and self._engine is not None:
            answer = self._engine.predict(features)
        else:
            answer = self._ask_lightgbm(features)
        return np.asarray(np.clip(answer, self.low, self.high))

    def _ask_lightgbm(self, features: Matrix) -> FloatColumn:
        return np.asarray(self._model.predict(features, num_threads=self.num_threads))

    @cached_property
    def _model(self) -> lightgbm.Booster:
        import lightgbm

        return self.booster or lightgbm.Booster(model_str=self.text)

    @cached_property
    def _engine(self) -> TreeEngine | None:
        """What answers tables; none before the model is settled, or where LightGBM differs."""
        if not self.text:
            return None
        try:
            engine = build_engine(self.text)
        except ValueError as err:
            _log.warning("trees answer slowly: %s", err)
            return None
        rows = engine.draw_rows(_NUM_COMPARED)
        truth = self._ask_lightgbm(rows)
        apart = float(np.abs(engine.predict(rows) - truth).max())
        if not apart <= _MAX_APART * max(1.0, float(np.abs(truth).max())):
            _log.warning("trees answer slowly: the engine is %.2g off LightGBM", apart)
            return None
        return engine


def grow_trees(features: Matrix, values: FloatColumn, config: PredictorConfig, seed: int) -> Trees:
    """Train on rows; fewer than `min_rows` give their median, more than `max_rows` are thinned."""
    import lightgbm

    constant = float(np.median(values))
    if len(values) < config.min_rows:
        return Trees(constant, "", None, config.num_threads)
    rows = np.arange(len(values))
    if len(rows) > config.max_rows:
        rows = np.sort(np.random.default_rng(seed).choice(rows, config.max_rows, replace=False))
    booster = lightgbm.train(
        tree_parameters(config.booster, seed) | {"num_threads": config.num_threads},
        lightgbm.Dataset(features[rows], values[rows]),
        num_boost_round=min(config.booster.num_trees, _count_trees(len(rows), config.booster)),
        keep_training_booster=True,
    )
    bounds = float(values.min()), float(values.max())
    return Trees(constant, "", booster, config.num_threads, *bounds)


def _count_trees(num_rows: int, config: BoosterConfig) -> int:
    return max(_MIN_TREES, num_rows // config.rows_per_tree)


def tree_parameters(config: BoosterConfig, seed: int) -> dict[str, object]:
    """Return LightGBM's parameters; with these the same rows give the same bytes."""
    return {
        "objective": "regression",
        "num_leaves": config.num_leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": config.min_rows_in_leaf,
        "bagging_fraction": config.row_fraction,
        "bagging_freq": 1,
        "feature_fraction": config.feature_fraction,
        "linear_tree": config.is_linear,
        "linear_lambda": config.linear_shrinkage,
        "max_bin": config.max_bins,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbose": -1,
    }
