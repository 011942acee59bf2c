"""Nearest points: the same ones for a call alone and in a table, ties of grids included."""

import numpy as np
import pytest

from foretoken.predictor.neighbours import NearestPoints


def _grid(num_axes: int, per_axis: int) -> np.ndarray:
    steps = np.log2(1.0 + 2.0 ** np.arange(per_axis))
    return np.stack(np.meshgrid(*[steps] * num_axes), axis=-1).reshape(-1, num_axes)


@pytest.mark.parametrize("num_axes", [1, 2, 4])
def test_calls_alone_and_in_a_table_have_the_same_neighbours(num_axes: int) -> None:
    """On a grid most calls lie as near to several points; which is taken never depends on others.

    The first calls are compared with every point, later ones looked up in a tree.
    """
    places = _grid(num_axes, 6)
    calls = np.concatenate([places, (places[:-1] + places[1:]) / 2, places * 3.0, -places])
    count = min(5, len(places))
    together = NearestPoints(places).find(np.tile(calls, (10, 1)), count)[: len(calls)]
    alone = [NearestPoints(places).find(call[None], count)[0].tolist() for call in calls]
    assert together.tolist() == alone


def test_a_point_s_own_place_comes_first_and_farther_points_later() -> None:
    """The order is that of the distances."""
    places = _grid(2, 5)
    rows = NearestPoints(places).find(places[:4], len(places))
    assert rows[:, 0].tolist() == [0, 1, 2, 3]
    for row, call in zip(rows, places[:4], strict=True):
        distance = np.linalg.norm(places[row] - call, axis=1)
        assert (np.diff(distance) > -1e-8).all()
