"""Trees with linear leaves over the features, by LightGBM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.features import Matrix
from foretoken.predictor.regression.forest import Forest, read_forest
from foretoken.predictor.regression.light_imports import load_lightgbm
from foretoken.predictor.regression.tree_engine import TreeEngine, build_engine
from foretoken.predictor.roofline import FloatColumn, IntColumn

if TYPE_CHECKING:
    import lightgbm

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

# Up to so many rows are answered without the compiler, whose import takes longer.
_MAX_FEW_ROWS = 16
# However few the rows.
_MIN_TREES = 10


@dataclass(frozen=True)
class Trees:
    """Trees over features, or a constant where there are too few rows for trees.

    `booster` is LightGBM's model as trained, `forest` the same as it is stored; neither is there
    for a constant, and only one before and after it was settled. Answers stay between `low` and
    `high`: lines in leaves go on where data end.
    """

    constant: float
    forest: Forest | None = None
    booster: lightgbm.Booster | None = None
    low: float = -np.inf
    high: float = np.inf

    @classmethod
    def of_booster(cls, booster: lightgbm.Booster, constant: float) -> Trees:
        """Return the model as it is after a restart, without bounds."""
        return cls(constant, booster=booster).settle()

    @classmethod
    def from_arrays(cls, name: str, arrays: Arrays) -> Trees:
        """Return the model from what is stored under a name."""
        constant, low, high = arrays[f"{name}.range"].tolist()
        has_trees = f"{name}.num_leaves" in arrays
        forest = Forest.from_arrays(name, arrays) if has_trees else None
        return cls(constant, forest, None, low, high)

    def to_arrays(self, name: str) -> Arrays:
        """Return what is stored of a settled model, under a name."""
        own = {f"{name}.range": np.array([self.constant, self.low, self.high])}
        return {**own, **self.forest.to_arrays(name)} if self.forest else own

    def settle(self) -> Trees:
        """Return the model as it is after a restart."""
        if self.booster is None:
            return self
        forest = read_forest(self.booster.model_to_string()).rounded()
        return replace(self, forest=forest, booster=None)

    def predict(self, features: Matrix) -> FloatColumn:
        """Return one value per row; features are finite."""
        if self.booster is not None:
            answer = np.asarray(self.booster.predict(features, num_threads=1))
        elif self.forest is None:
            return np.full(len(features), self.constant)
        elif len(features) <= _MAX_FEW_ROWS:
            answer = self.forest.predict(features)
        else:
            answer = self._engine.predict(features)
        return np.asarray(np.clip(answer, self.low, self.high))

    @cached_property
    def _engine(self) -> TreeEngine:
        """What answers tables."""
        if self.forest is None:
            raise ValueError("a constant has no trees")
        return build_engine(self.forest)


class TreeRows:
    """Rows that trees are grown on, put into bins once for the trees over any part of them."""

    def __init__(self, features: Matrix, config: PredictorConfig, *, is_linear: bool) -> None:
        """Take the features of all rows, and whether leaves are to hold lines."""
        self._config = config
        self._booster = replace(config.booster, is_linear=is_linear)
        self._features = features

    def grow(self, rows: IntColumn, values: FloatColumn, config: BoosterConfig, seed: int) -> Trees:
        """Train on the value at each of some ascending rows.

        Fewer than `min_rows` give their median.
        """
        constant = float(np.median(values)) if len(values) else 0.0
        if len(rows) < self._config.min_rows:
            return Trees(constant)
        chosen = tree_parameters(replace(config, is_linear=self._booster.is_linear), seed)
        chosen |= {"num_threads": self._config.num_threads}
        part = self._binned.subset(rows.tolist(), params=chosen).construct()
        num_trees = min(config.num_trees, _count_trees(len(rows), config))
        booster = boost(chosen, part.set_label(values), num_trees)
        return Trees(constant, None, booster, float(values.min()), float(values.max()))

    @cached_property
    def _binned(self) -> lightgbm.Dataset:
        # Each part has labels of its own.
        labels = np.zeros(len(self._features))
        chosen = tree_parameters(self._booster, 0) | {"num_threads": self._config.num_threads}
        return load_lightgbm().Dataset(self._features, labels, params=chosen, free_raw_data=False)


def _count_trees(num_rows: int, config: BoosterConfig) -> int:
    return max(_MIN_TREES, num_rows // config.rows_per_tree)


def boost(
    parameters: Mapping[str, object], data: lightgbm.Dataset, num_trees: int
) -> lightgbm.Booster:
    """Return what `lightgbm.train` does, in nine tenths of its time where tables are small."""
    booster = load_lightgbm().Booster(dict(parameters), data)
    for _ in range(num_trees):
        if booster.update():
            break
    return booster


def tree_parameters(config: BoosterConfig, seed: int) -> dict[str, object]:
    """Return LightGBM's parameters; with these the same rows give the same bytes."""
    return {
        "objective": "regression",
        "num_leaves": config.num_leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": config.min_rows_in_leaf,
        "linear_tree": config.is_linear,
        "linear_lambda": config.linear_shrinkage,
        "max_bin": config.max_bins,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbose": -1,
    }
