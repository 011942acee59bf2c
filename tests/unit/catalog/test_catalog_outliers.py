"""Slips leave their line; slopes, steps and ends of lines do not."""

import numpy as np
import pytest

from foretoken.catalog.quality.line import deviations_from_lines, merge_duplicates


def _deviations(latency_us: list[float], **columns: list[int]) -> list[float]:
    arrays = {name: np.array(column) for name, column in columns.items()}
    size = len(latency_us)
    found = deviations_from_lines(arrays, np.array(latency_us, dtype=float), np.ones(size))
    return [round(float(ratio), 3) for ratio in found]


def test_a_flat_line_fits() -> None:
    assert [1.0] * 8 == _deviations([10.0] * 8, m=list(range(1, 9)))


def test_a_slip_is_off_by_its_factor_and_its_neighbours_fit() -> None:
    times = [10.0] * 9
    times[4] = 30.0
    assert [1, 1, 1, 1, 3, 1, 1, 1, 1] == _deviations(times, m=list(range(1, 10)))


def test_rows_need_not_be_sorted() -> None:
    times, sizes = [30.0, *[10.0] * 8], [5, 9, 8, 7, 6, 4, 3, 2, 1]
    assert [3, 1, 1, 1, 1, 1, 1, 1, 1] == _deviations(times, m=sizes)


def test_a_slope_fits() -> None:
    assert [1.0] * 8 == _deviations([2.0**i for i in range(8)], m=[2**i for i in range(8)])


def test_a_step_fits() -> None:
    """Beyond some size another kernel runs, three times slower."""
    assert [1.0] * 8 == _deviations([10.0] * 4 + [30.0] * 4, m=list(range(1, 9)))


def test_two_neighbours_that_agree_fit() -> None:
    """Just above a multiple of the tile size a GEMM is slower; that is no slip."""
    times = [10.0] * 4 + [30.0] * 2 + [10.0] * 4
    assert [1.0] * 10 == _deviations(times, m=list(range(1, 11)))


def test_the_end_of_a_line_must_be_far_off() -> None:
    sizes = list(range(1, 7))
    assert 2.0 == _deviations([80.0, *[10.0] * 5], m=sizes)[0]


def test_too_few_neighbours_say_nothing() -> None:
    assert [1.0] * 3 == _deviations([10.0, 1000.0, 10.0], m=[1, 2, 3])


def test_a_point_that_fits_one_of_its_lines_fits() -> None:
    """n = 3 is slow for every m: the row is off along n, but not along m."""
    sizes = range(1, 8)
    columns = {"m": [m for m in sizes for _ in sizes], "n": list(sizes) * 7}
    times = [30.0 if n == 3 else 10.0 for n in columns["n"]]
    assert [1.0] * 49 == _deviations(times, **columns)
    times[3 * 7 + 2] = 90.0  # the middle of that slow column
    assert 3.0 == max(_deviations(times, **columns))


def test_dimensions_that_grow_together_are_a_line() -> None:
    """Context summed and context of the longest sequence of an even batch."""
    sizes = list(range(1, 10))
    times = [10.0] * 9
    times[4] = 30.0
    assert 3.0 == _deviations(times, kv_tokens=[4 * s for s in sizes], kv_tokens_max=sizes)[4]


def test_a_line_of_the_expected_shape_is_flat() -> None:
    sizes = np.array([2**i for i in range(8)])
    fits = deviations_from_lines({"m": sizes}, 3.0 * sizes, sizes.astype(float))
    assert pytest.approx(np.ones(8)) == fits


def test_duplicates_are_one_point_of_their_median() -> None:
    columns = {"m": np.array([2, 1, 2, 2])}
    points = merge_duplicates(columns, np.array([5.0, 1.0, 9.0, 7.0]))
    assert [1, 2] == points.columns_of(columns)["m"].tolist()
    assert [1.0, 7.0] == points.latency_us.tolist()
    assert [1, 0, 1, 1] == points.point_of_row.tolist()
