"""The engine that answers tables by trees says what LightGBM says."""

from collections.abc import Mapping

import lightgbm
import numpy as np
import numpy.typing as npt
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.regression.forest import Forest, read_forest
from foretoken.predictor.regression.tree_engine import build_engine
from foretoken.predictor.regression.trees import TreeRows, Trees, tree_parameters

_Floats = npt.NDArray[np.float64]

# Enough for the engine, and not a multiple of the rows it does together.
_NUM_ROWS = 1_001


def draw(seed: int, num_features: int = 5) -> tuple[_Floats, _Floats]:
    """Return features, one of them always the same and one with few values, and what they cause."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0.0, 3.0, (_NUM_ROWS, num_features))
    features[:, 1] = 7.0
    features[:, 2] = rng.integers(0, 4, _NUM_ROWS)
    steps = np.where(features[:, 0] > 1.0, features[:, 2], 0.3 * features[:, 3])
    return features, np.sin(features[:, 0]) + steps


def grow(seed: int, **parameters: object) -> lightgbm.Booster:
    features, values = draw(seed)
    chosen = tree_parameters(BoosterConfig(), seed) | {"num_threads": 1} | parameters
    return lightgbm.train(chosen, lightgbm.Dataset(features, values), num_boost_round=30)


def ask_lightgbm(booster: lightgbm.Booster, features: _Floats) -> _Floats:
    return np.asarray(booster.predict(features, num_threads=1))


def as_forest(booster: lightgbm.Booster) -> Forest:
    return read_forest(booster.model_to_string())


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
    forest, truth = as_forest(trees), ask_lightgbm(trees, features)
    assert pytest.approx(truth, rel=1e-9, abs=1e-12) == forest.predict(features)
    # The engine's lines are single precision.
    found = build_engine(forest).predict(features)
    assert np.abs(found - truth).max() < 1e-5 * np.abs(truth).max()


def test_what_is_stored_says_nearly_what_lightgbm_says() -> None:
    """Slopes are rounded to 11 bits: within 0.1 % where the trees were grown."""
    trees, features = grow(0), draw(0)[0]
    truth = ask_lightgbm(trees, features)
    found = as_forest(trees).rounded().predict(features)
    assert np.abs(found - truth).max() < 1e-3 * np.abs(truth).max()
    assert np.abs(found - truth).max() > 0.0


def test_some_leaves_have_lines_and_others_none() -> None:
    """As the models above have: their parity is that of both."""
    num_slopes = as_forest(grow(0)).num_slopes
    assert 0 < (num_slopes > 0).sum() < len(num_slopes)


def test_trees_without_a_split_are_constants() -> None:
    features, _ = draw(0)
    data = lightgbm.Dataset(features, np.full(_NUM_ROWS, 0.7))
    chosen = tree_parameters(BoosterConfig(), 0) | {"num_threads": 1}
    forest = as_forest(lightgbm.train(chosen, data, num_boost_round=3))
    assert pytest.approx(np.full(_NUM_ROWS, 0.7)) == build_engine(forest).predict(features)
    assert pytest.approx(np.full(3, 0.7)) == forest.predict(features[:3])


def test_equal_questions_get_equal_answers() -> None:
    """However many rows are asked with them, and of whichever engine of the model."""
    forest, (features, _) = as_forest(grow(0)), draw(5)
    whole = build_engine(forest).predict(features)
    assert whole[:70].tolist() == build_engine(forest).predict(features[:70]).tolist()


def test_a_few_rows_and_a_table_get_the_same_answers() -> None:
    features, values = draw(3)
    config = PredictorConfig(state_folder="", booster=BoosterConfig(num_trees=20))
    rows = TreeRows(features, config, is_linear=True)
    trees = rows.grow(np.arange(_NUM_ROWS), values, config.booster, seed=0).settle()
    few = np.concatenate([trees.predict(features[row : row + 1]) for row in range(40)])
    assert pytest.approx(few, rel=1e-5, abs=1e-6) == trees.predict(features)[:40]


def test_answers_stay_within_bounds() -> None:
    features, _ = draw(3)
    bounded = Trees(0.0, as_forest(grow(0)), None, -0.1, 0.2)
    assert (-0.1, 0.2) == (bounded.predict(features).min(), bounded.predict(features).max())


def test_trees_of_more_leaves_than_a_word_has_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 32 leaves"):
        as_forest(grow(0, num_leaves=60, min_data_in_leaf=3))
    with pytest.raises(InvalidRequestError, match="from 2 to 32"):
        BoosterConfig(num_leaves=33)


def test_stored_trees_are_the_same_again() -> None:
    trees = Trees.of_booster(grow(0), 0.5)
    again = Trees.from_arrays("own", trees.to_arrays("own"))
    features, _ = draw(3)
    assert trees.predict(features).tolist() == again.predict(features).tolist()


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 4 features, not 5"):
        build_engine(as_forest(grow(0))).predict(np.zeros((20, 4)))


def test_trees_that_split_on_categories_are_refused() -> None:
    features, values = draw(0)
    data = lightgbm.Dataset(features, values, categorical_feature=[2])
    chosen = {"objective": "regression", "verbose": -1, "num_threads": 1, "cat_smooth": 1}
    booster = lightgbm.train(chosen, data, num_boost_round=5)
    with pytest.raises(ValueError, match="categories"):
        as_forest(booster)
