"""The planner takes the points that tell most about the others for their cost."""

import numpy as np

from foretoken.predictor.planning.error_field import ErrorField, thin_rows
from foretoken.predictor.planning.profile_plan import PlanQuestion, Ranking, rank_points
from foretoken.predictor.regression.kriging import Scales

_SCALES = Scales(np.zeros(1), -6.0, 0.3)
_LINE = np.arange(21.0)[:, None] / 2.0


def _rank(
    known: np.ndarray | None = None,
    gpu_s: np.ndarray | None = None,
    budget_gpu_s: float = 1e9,
    max_points: int = 4,
) -> Ranking:
    return rank_points(
        PlanQuestion(
            candidates=_LINE,
            known=_LINE[:0] if known is None else known,
            gpu_s=np.ones(len(_LINE)) if gpu_s is None else gpu_s,
            scales=_SCALES,
            budget_gpu_s=budget_gpu_s,
            max_points=max_points,
        )
    )


def test_the_first_points_spread_over_the_axis() -> None:
    chosen = np.sort(_LINE[_rank(max_points=5).rows, 0])
    assert np.diff(chosen).min() >= 1.0
    assert chosen[0] < 3.0
    assert chosen[-1] > 7.0


def test_no_point_is_planned_twice() -> None:
    ranking = _rank(max_points=0)
    assert list(range(len(_LINE))) == sorted(ranking.rows.tolist())


def test_the_expected_error_falls_with_every_point() -> None:
    ranking = _rank(max_points=6)
    errors = [ranking.error_before_ratio, *ranking.error_ratio.tolist()]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_what_is_known_is_not_asked_again() -> None:
    """With one half measured, the other half is planned."""
    ranking = _rank(known=_LINE[:11], max_points=2)
    assert (_LINE[ranking.rows, 0] > 5.0).all()


def test_the_budget_is_never_exceeded() -> None:
    gpu_s = np.linspace(1.0, 3.0, len(_LINE))
    ranking = _rank(gpu_s=gpu_s, budget_gpu_s=7.0, max_points=0)
    assert 0.0 < gpu_s[ranking.rows].sum() <= 7.0


def test_dear_points_are_left_for_cheap_ones_beside_them() -> None:
    gpu_s = np.where(np.arange(len(_LINE)) % 2 == 0, 10.0, 1.0)
    assert (_rank(gpu_s=gpu_s).rows % 2 == 1).all()


def test_nothing_is_planned_without_a_budget() -> None:
    assert [] == _rank(budget_gpu_s=0.5).rows.tolist()


def test_the_same_question_gives_the_same_plan() -> None:
    assert _rank().rows.tolist() == _rank().rows.tolist()


def test_one_by_one_is_the_same_as_all_known_at_once() -> None:
    """Conditioning on points after each other or together leaves the same uncertainty."""
    stepwise = ErrorField(_LINE, _LINE, _LINE[:0], _SCALES)
    for row in (3, 17, 8):
        stepwise.measure(row)
    at_once = ErrorField(_LINE, _LINE, _LINE[[3, 17, 8]], _SCALES)
    np.testing.assert_allclose(stepwise.gains(), at_once.gains(), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(stepwise.error_ratio, at_once.error_ratio, rtol=1e-6)


def test_thinning_keeps_order_and_takes_few_as_they_are() -> None:
    assert [0, 1, 2] == thin_rows(3, 5, 0).tolist()
    drawn = thin_rows(100, 10, 0).tolist()
    assert 10 == len(set(drawn))
    assert drawn == sorted(drawn)
