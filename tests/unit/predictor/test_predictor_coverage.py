"""The tier of a call is what its surroundings look like."""

import itertools
from collections.abc import Iterable

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.coverage import Tier, is_extrapolated, map_coverage
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.roofline import Target

TARGET = Target(device=find_device("a100_sxm_80"), dtype=DType.BF16)
SHAPES = [(4096, 4096), (4096, 11008), (8192, 4096), (8192, 11008), (6144, 6144)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 256, 512, 1024]
HEADS = [(32, 8, 128), (16, 4, 128), (8, 8, 128), (8, 1, 128)]
LENGTHS = [128, 256, 512, 2048, 4096]


def design_of(operator: str, rows: Iterable[tuple[int, ...]]) -> Design:
    spec = find_operator(operator)
    points = np.array(list(rows))
    columns = {name: points[:, place] for place, name in enumerate(spec.dim_names)}
    return build_design(spec, columns, TARGET)


def tiers_of(operator: str, measured: Design, asked: Design) -> list[Tier]:
    coverage = map_coverage(find_operator(operator), measured.points, measured.axes)
    neighbours = PointIndex(measured.points).find(asked)
    return [Tier(tier) for tier in coverage.tiers(asked, neighbours).tolist()]


def gemm_tiers(measured: Iterable[tuple[int, ...]], *asked: tuple[int, ...]) -> list[Tier]:
    return tiers_of("gemm", design_of("gemm", measured), design_of("gemm", asked))


def gemm_grid() -> list[tuple[int, int, int]]:
    return [(m, n, k) for m in ROWS for n, k in SHAPES]


def prefill(num_seqs: int, q_len: int, heads: tuple[int, ...] = HEADS[0]) -> tuple[int, ...]:
    return (*prefill_dims(num_seqs, q_len, 0).values(), *heads)


def prefill_tiers(*asked: tuple[int, ...]) -> list[Tier]:
    measured = [
        prefill(num_seqs, q_len, heads)
        for num_seqs, q_len, heads in itertools.product((1, 2, 4, 8), LENGTHS, HEADS)
    ]
    operator = "attention_prefill"
    return tiers_of(operator, design_of(operator, measured), design_of(operator, asked))


def test_a_point_missing_from_the_grid_is_on_it() -> None:
    missing = (64, 4096, 11008)
    assert gemm_tiers((row for row in gemm_grid() if row != missing), missing) == [Tier.GRID]


def test_a_value_that_no_point_has_is_in_a_gap() -> None:
    assert gemm_tiers(gemm_grid(), (128, 4096, 4096), (3, 8192, 4096)) == [Tier.GAP, Tier.GAP]


def test_a_combination_not_measured_is_a_new_configuration() -> None:
    assert gemm_tiers(gemm_grid(), (64, 6144, 4096)) == [Tier.NEW_CONFIGURATION]


def test_what_exceeds_a_range_is_beyond() -> None:
    assert gemm_tiers(gemm_grid(), (2048, 4096, 4096), (64, 16384, 4096)) == [
        Tier.BEYOND,
        Tier.FAR_CONFIGURATION,
    ]


def test_longer_sequences_are_beyond_though_the_batch_has_fewer_tokens() -> None:
    """Eight sequences of 4096 tokens were measured, none of 8192."""
    assert prefill_tiers(prefill(1, 8192), prefill(2, 8192)) == [Tier.BEYOND, Tier.BEYOND]


def test_a_length_between_those_measured_is_in_a_gap() -> None:
    assert prefill_tiers(prefill(1, 1024), prefill(8, 1024)) == [Tier.GAP, Tier.GAP]


def test_a_measured_length_is_on_the_grid_or_of_a_new_configuration() -> None:
    assert prefill_tiers(prefill(2, 512), prefill(2, 512, (16, 8, 128))) == [
        Tier.GRID,
        Tier.NEW_CONFIGURATION,
    ]


def test_between_dense_values_only_a_hole_is_a_gap() -> None:
    """A value of a dense axis is as good as any other, unless many around it are missing."""
    measured = [(m, 4096, 4096) for m in (*range(100, 200, 2), *range(300, 400, 2))]
    assert gemm_tiers(measured, (151, 4096, 4096), (250, 4096, 4096)) == [Tier.GRID, Tier.GAP]


def test_a_densely_measured_configuration_has_an_end_of_its_own() -> None:
    measured = [(m, 4096, 4096) for m in range(10, 400, 10)]
    measured += [(m, 8192, 4096) for m in range(10, 800, 10)]
    assert gemm_tiers(measured, (430, 4096, 4096), (600, 4096, 4096), (600, 8192, 4096)) == [
        Tier.GRID,
        Tier.BEYOND,
        Tier.GRID,
    ]


def test_an_empty_corner_of_the_range_is_beyond() -> None:
    """Inside the range of every dimension, but far from all points."""
    measured = [(m, 2**14 // m, 4096) for m in (1, 16, 256, 4096)]
    assert gemm_tiers(measured, (4096, 16384, 4096), (256, 64, 4096)) == [Tier.BEYOND, Tier.GRID]


def test_all_of_a_peeled_octave_and_almost_none_of_random_points_are_extrapolated() -> None:
    rng = np.random.default_rng(0)
    grid = np.array(gemm_grid())
    is_outer = grid[:, 0] > grid[:, 0].max() // 2
    peeled = gemm_tiers(grid[~is_outer], *grid[is_outer])
    assert is_extrapolated(np.array(peeled)).all()
    is_out = np.zeros(len(grid), dtype=bool)
    is_out[rng.permutation(len(grid))[:10]] = True
    drawn = gemm_tiers(grid[~is_out], *grid[is_out])
    assert not is_extrapolated(np.array(drawn)).any()


def test_of_three_values_far_apart_the_wider_step_is_a_gap() -> None:
    """Each step is held against the other."""
    measured = [(row, n, k) for row in (1, 2, 512) for n, k in SHAPES]
    assert [Tier.GAP] == gemm_tiers(measured, (32, 4096, 4096))
