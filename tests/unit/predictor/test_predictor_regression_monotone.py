"""The floor under estimates: measured points that a call surpasses in every dimension."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.regression.monotone import learn_floor

GEMM = find_operator("gemm")
_Points = npt.NDArray[np.int64]


def gemms(*points: tuple[int, int, int]) -> _Points:
    return np.array(points, dtype=np.int64)


MEASURED = gemms((16, 512, 512), (64, 512, 512), (64, 1024, 512))
MEASURED_US = np.array([5.0, 8.0, 20.0])


def test_a_call_is_not_below_the_slowest_point_it_surpasses() -> None:
    floor = learn_floor(GEMM, MEASURED, MEASURED_US)
    asked = gemms((128, 512, 512), (32, 512, 512), (64, 512, 512))
    assert floor.floor_us(asked).tolist() == [8.0, 5.0, 8.0]


def test_points_of_other_configurations_do_not_count() -> None:
    floor = learn_floor(GEMM, MEASURED, MEASURED_US)
    assert floor.floor_us(gemms((128, 2048, 512), (128, 512, 4096))).tolist() == [0.0, 0.0]


def test_calls_smaller_than_all_points_have_no_floor() -> None:
    floor = learn_floor(GEMM, MEASURED, MEASURED_US)
    assert floor.floor_us(gemms((8, 512, 512))).tolist() == [0.0]


def test_a_series_whose_measurements_fall_allows_calls_to_fall_as_far() -> None:
    sizes = np.arange(1, 101)
    points = np.stack([sizes, np.full(100, 512), np.full(100, 512)], axis=1)
    # From one kernel to the next the latency halves once, and rises slowly otherwise.
    latency_us = 10.0 + sizes / 100.0
    latency_us[50:] /= 2.0
    floor = learn_floor(GEMM, points, latency_us)
    assert 0.45 < floor.slack_ratio < 0.55
    assert (floor.floor_us(points) <= latency_us * 1.01).all()


def test_collectives_have_no_floor() -> None:
    spec = find_operator("all_reduce")
    points = np.array([[1024, 8, 1], [4096, 8, 1]], dtype=np.int64)
    floor = learn_floor(spec, points, np.array([10.0, 20.0]))
    assert floor.floor_us(points * 2).tolist() == [0.0, 0.0]


@given(
    points=npst.arrays(np.int64, (12, 3), elements=st.integers(1, 6)),
    asked=npst.arrays(np.int64, (5, 3), elements=st.integers(1, 6)),
    more=st.integers(0, 5),
)
def test_the_floor_never_falls_when_a_size_grows(
    points: _Points, asked: _Points, more: int
) -> None:
    floor = learn_floor(GEMM, points, np.linspace(1.0, 9.0, len(points)))
    larger = asked + np.array([more, 0, 0])
    assert (floor.floor_us(larger) >= floor.floor_us(asked)).all()


def test_few_calls_and_many_find_the_same() -> None:
    rng = np.random.default_rng(0)
    points = np.unique(2 ** rng.integers(3, 9, (200, 3)), axis=0)
    floor = learn_floor(GEMM, points, rng.uniform(1.0, 100.0, len(points)))
    asked = 2 ** rng.integers(3, 11, (60, 3))
    few = [floor.floor_us(asked[start : start + 5]) for start in range(0, 60, 5)]
    assert floor.floor_us(asked).tolist() == np.concatenate(few).tolist()


def test_a_configuration_of_many_points_keeps_its_slowest() -> None:
    m = np.arange(1, 1001)
    points = np.stack([m, np.full(1000, 64), np.full(1000, 64)], axis=1)
    floor = learn_floor(GEMM, points, m.astype(float))
    assert len(floor.points) <= 256
    assert floor.floor_us(np.array([[5000, 64, 64]])).tolist() == [1000.0]
