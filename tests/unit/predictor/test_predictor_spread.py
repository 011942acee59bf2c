"""How uncertain calls are: far from points, or where the members of a model disagree."""

import numpy as np
import pytest

from foretoken.predictor.regression.member import STEPS
from foretoken.predictor.regression.series_regressor import mix, spread


def test_members_that_disagree_make_a_call_doubtful() -> None:
    """3 and 4 make 5, as distances do."""
    found = spread(np.array([[0.0, 8.0], [5.0, 5.0]]), np.array([3.0, 3.0]))
    assert found.tolist() == pytest.approx([5.0, 3.0])


def test_steps_do_not_make_a_call_doubtful() -> None:
    answers = np.zeros((1, STEPS + 1))
    answers[0, STEPS] = 100.0
    assert [2.0] == spread(answers, np.array([2.0])).tolist()


def test_shares_are_those_of_a_calls_tier() -> None:
    shares = np.array([[1.0, 0.0], [0.25, 0.75]])
    answers = np.array([[4.0, 8.0], [4.0, 8.0]])
    assert [4.0, 7.0] == mix(answers, shares, np.array([0, 1])).tolist()
