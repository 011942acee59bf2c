"""The engine that answers tables by trees says what LightGBM says."""

import logging
from collections.abc import Mapping

import lightgbm
import numpy as np
import numpy.typing as npt
import pytest

from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.regression.tree_engine import build_engine
from foretoken.predictor.regression.tree_text import read_trees
from foretoken.predictor.regression.trees import Trees, grow_trees, tree_parameters

_Floats = npt.NDArray[np.float64]

# Enough for the engine, and not a multiple of the rows it does together.
_NUM_ROWS = 1_001
_DIFFERS = "the engine is"


def draw(seed: int, num_features: int = 5) -> tuple[_Floats, _Floats]:
    """Return features, one of them always the same and one with few values, and what they cause."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0.0, 3.0, (_NUM_ROWS, num_features))
    features[:, 1] = 7.0
    features[:, 2] = rng.integers(0, 4, _NUM_ROWS)
    steps = np.where(features[:, 0] > 1.0, features[:, 2], 0.3 * features[:, 3])
    return features, np.sin(features[:, 0]) + steps


def grow(seed: int, **parameters: object) -> Trees:
    features, values = draw(seed)
    chosen = tree_parameters(BoosterConfig(), seed) | {"num_threads": 1} | parameters
    booster = lightgbm.train(chosen, lightgbm.Dataset(features, values), num_boost_round=30)
    return Trees.load(booster.model_to_string(), 0.0, 1)


def ask_lightgbm(trees: Trees, features: _Floats) -> _Floats:
    booster = lightgbm.Booster(model_str=trees.text)
    return np.asarray(booster.predict(features, num_threads=1))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"linear_tree": False},
        {"num_leaves": 2},
        {"num_leaves": 32},
        {"max_bin": 7},
        {"extra_trees": True, "linear_tree": False},
        {"min_data_in_leaf": 400},
        {"objective": "regression_l1", "linear_tree": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_engine_says_what_lightgbm_says(seed: int, parameters: Mapping[str, object]) -> None:
    """Also far outside what the trees were grown on."""
    trees = grow(seed, **parameters)
    features = draw(seed + 10)[0] * 3.0
    found = build_engine(trees.text).predict(features)
    assert pytest.approx(ask_lightgbm(trees, features), rel=1e-9, abs=1e-12) == found


def test_some_leaves_have_lines_and_others_none() -> None:
    """As the models above have: their parity is that of both."""
    trees = list(read_trees(grow(0).text))
    num_lines = sum(len(np.unique(tree.line_leaf)) for tree in trees)
    assert 0 < num_lines < sum(tree.num_leaves for tree in trees)


def test_trees_without_a_split_are_constants() -> None:
    features, _ = draw(0)
    data = lightgbm.Dataset(features, np.full(_NUM_ROWS, 0.7))
    chosen = tree_parameters(BoosterConfig(), 0) | {"num_threads": 1}
    text = lightgbm.train(chosen, data, num_boost_round=3).model_to_string()
    assert pytest.approx(np.full(_NUM_ROWS, 0.7)) == build_engine(text).predict(features)


def test_equal_questions_get_equal_answers() -> None:
    """However many rows are asked with them, and of whichever engine of the model."""
    text, (features, _) = grow(0).text, draw(5)
    whole = build_engine(text).predict(features)
    assert whole[:70].tolist() == build_engine(text).predict(features[:70]).tolist()


def test_a_few_rows_and_a_table_get_the_same_answers() -> None:
    features, values = draw(3)
    config = PredictorConfig(state_folder="", booster=BoosterConfig(num_trees=20))
    trees = grow_trees(features, values, config, seed=0).settle()
    few = np.concatenate([trees.predict(features[row : row + 1]) for row in range(40)])
    assert pytest.approx(few, rel=1e-9) == trees.predict(features)[:40]


def test_answers_stay_within_bounds() -> None:
    features, _ = draw(3)
    bounded = Trees.load(grow(0).text, 0.0, 1, (-0.1, 0.2))
    assert (-0.1, 0.2) == (bounded.predict(features).min(), bounded.predict(features).max())


def test_what_the_engine_cannot_hold_lightgbm_answers(caplog: pytest.LogCaptureFixture) -> None:
    features, _ = draw(3)
    trees = grow(0, num_leaves=60, min_data_in_leaf=3)
    found = trees.predict(features)
    assert "more than 32 leaves" in caplog.text
    assert ask_lightgbm(trees, features).tolist() == found.tolist()


def test_an_engine_that_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A file that says that its trees are averaged: LightGBM heeds it, the engine does not."""
    features, _ = draw(3)
    trees = grow(0, linear_tree=False)
    averaged = Trees.load(trees.text.replace("version=v4", "version=v4\naverage_output"), 0.0, 1)
    found = averaged.predict(features)
    assert _DIFFERS in caplog.text
    assert ask_lightgbm(averaged, features).tolist() == found.tolist()


def test_an_engine_that_agrees_is_used_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        grow(0).predict(draw(3)[0])
    assert "" == caplog.text


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 4 features, not 5"):
        build_engine(grow(0).text).predict(np.zeros((20, 4)))


def test_trees_that_split_on_categories_are_refused() -> None:
    features, values = draw(0)
    data = lightgbm.Dataset(features, values, categorical_feature=[2])
    chosen = {"objective": "regression", "verbose": -1, "num_threads": 1, "cat_smooth": 1}
    text = lightgbm.train(chosen, data, num_boost_round=5).model_to_string()
    with pytest.raises(ValueError, match="categories"):
        build_engine(text)
