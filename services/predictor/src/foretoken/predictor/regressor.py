"""Functions from a call to its log ratio: log(latency / base latency)."""

from dataclasses import dataclass
from typing import Protocol

import lightgbm
import numpy as np

from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.neighbours import Neighbours
from foretoken.predictor.roofline import FloatColumn


class Regressor(Protocol):
    """A trained function; `residual_log` is what it leaves over at each training point."""

    residual_log: FloatColumn

    def smooth(self, design: Design) -> FloatColumn:
        """Return the log ratio of every call, the residuals not heeded."""


def predict_log_ratio(regressor: Regressor, design: Design, neighbours: Neighbours) -> FloatColumn:
    """Return the log ratio of every call, corrected by the residuals of its neighbours.

    Trees are steps; measured points near a call say how far the step is off there. On held-out
    sizes the correction takes the mean error from 3.3 % to 3.1 %, on one-dimensional operators
    from 1.9 % to 1.5 %; on new configurations it changes nothing.
    """
    return regressor.smooth(design) + neighbours.interpolate(regressor.residual_log)


@dataclass(frozen=True, slots=True)
class Trees:
    """A LightGBM model, or a constant where there are too few rows for trees.

    `text` is LightGBM's own format; empty for a constant.
    """

    constant: float
    text: str
    booster: lightgbm.Booster | None
    num_threads: int = 1

    @classmethod
    def load(cls, text: str, constant: float, num_threads: int) -> "Trees":
        """Return the model from its text."""
        booster = lightgbm.Booster(model_str=text) if text else None
        return cls(constant, text, booster, num_threads)

    def predict(self, features: Matrix) -> FloatColumn:
        """Return one value per row."""
        if self.booster is None:
            return np.full(len(features), self.constant)
        return np.asarray(self.booster.predict(features, num_threads=self.num_threads))


@dataclass(slots=True)
class TreeRegressor:
    """Trees over the features."""

    trees: Trees
    residual_log: FloatColumn

    def smooth(self, design: Design) -> FloatColumn:
        """Return the trees' answer."""
        return self.trees.predict(design.features)


def grow_trees(
    features: Matrix, log_ratio: FloatColumn, config: PredictorConfig, seed: int
) -> Trees:
    """Train on rows; fewer than `min_rows` give their median."""
    constant = float(np.median(log_ratio))
    if len(log_ratio) < config.min_rows:
        return Trees(constant, "", None, config.num_threads)
    booster = lightgbm.train(
        tree_parameters(config.booster, seed) | {"num_threads": config.num_threads},
        lightgbm.Dataset(features, log_ratio, free_raw_data=False),
        num_boost_round=config.booster.num_trees,
    )
    # Reading the text back makes a model answer the same before and after a restart.
    return Trees.load(booster.model_to_string(), constant, config.num_threads)


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
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbose": -1,
    }


def fit_tree_regressor(
    design: Design, log_ratio: FloatColumn, config: PredictorConfig, seed: int
) -> TreeRegressor:
    """Grow trees on at most `max_rows` of the points and keep all points' residuals."""
    chosen = np.arange(design.num_rows)
    if design.num_rows > config.max_rows:
        chosen = np.sort(np.random.default_rng(seed).choice(chosen, config.max_rows, replace=False))
    trees = grow_trees(design.features[chosen], log_ratio[chosen], config, seed)
    return TreeRegressor(trees, log_ratio - trees.predict(design.features))
