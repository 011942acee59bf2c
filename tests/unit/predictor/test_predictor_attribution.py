"""Attribution: what each feature adds to an answer."""

import numpy as np
import pytest

from foretoken.predictor.explaining import attribute
from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn

_BACKGROUND = np.random.default_rng(0).normal(size=(500, 4))
_CALL = np.array([2.0, -1.0, 0.5, 3.0])


def _product(features: Matrix) -> FloatColumn:
    return np.asarray(features[:, 0] * features[:, 1])


def test_features_of_a_sum_get_their_own_terms() -> None:
    """Whatever the order, each adds its weight times its distance from the mean."""
    weights = np.array([0.5, -1.0, 0.0, 2.0])
    background = np.tile(_BACKGROUND[:1], (5, 1))
    found = attribute(lambda features: features @ weights, _CALL, background)
    assert pytest.approx(weights * (_CALL - background[0])) == found


def test_what_is_added_is_the_answer_less_the_average() -> None:
    """Two features that only work together share what they do."""
    background = np.zeros((1, 4))
    found = attribute(_product, _CALL, background)
    assert pytest.approx(-2.0) == found.sum()
    assert pytest.approx([-1.0, -1.0], abs=0.25) == found[:2]
    assert [0.0, 0.0] == found[2:].tolist()


def test_the_same_seed_gives_the_same_values() -> None:
    first, second = (attribute(_product, _CALL, _BACKGROUND, seed=3) for _ in range(2))
    assert first.tolist() == second.tolist()
