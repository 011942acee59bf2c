"""Unit conversions, and the grids operators are swept over."""

import numpy as np

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import ceil_divide


def test_ceil_divide_rounds_up_for_numbers_and_columns() -> None:
    assert (0, 1, 1, 2) == tuple(ceil_divide(n, 4) for n in (0, 1, 4, 5))
    assert [0, 1, 1, 2] == ceil_divide(np.array([0, 1, 4, 5]), 4).tolist()


def test_powers_of_two_include_both_ends_and_only_powers() -> None:
    assert (1, 2, 4, 8) == powers_of_two(1, 8)
    assert (4,) == powers_of_two(3, 7)
    assert () == powers_of_two(5, 7)


def test_cross_yields_every_combination_by_name() -> None:
    expected = [{"m": 1, "n": 3}, {"m": 1, "n": 4}, {"m": 2, "n": 3}, {"m": 2, "n": 4}]
    assert expected == list(cross(m=(1, 2), n=(3, 4)))


def test_pick_takes_the_small_axis_when_quick() -> None:
    assert (1,) == pick(True, [1], [1, 2])
    assert (1, 2) == pick(False, [1], [1, 2])


def test_every_format_has_its_size_and_half_bytes_add_up() -> None:
    sizes = {
        DType.FP32: 4,
        DType.TF32: 4,
        DType.FP16: 2,
        DType.BF16: 2,
        DType.FP8: 1,
        DType.INT8: 1,
    }
    assert {**sizes, DType.INT4: 0.5, DType.FP4: 0.5} == {dtype: dtype.num_bytes for dtype in DType}
    assert (12, 1, 2) == (DType.FP32.bytes_of(3), DType.INT4.bytes_of(3), DType.INT4.bytes_of(4))
