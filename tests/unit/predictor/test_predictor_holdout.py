"""Splits leave out what they say, and always keep something to learn from."""

from collections.abc import Sequence

import numpy as np
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.coverage import Tier, map_coverage
from foretoken.predictor.intervals.holdout import (
    Fold,
    Split,
    SplitKind,
    share_models,
    split_points,
    thin_rows,
)
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.roofline import Target

ROWS = 2 ** np.arange(11)
SHAPES = [(n, k) for n in (1024, 2048, 4096) for k in (1024, 2048, 4096)]


def design_of(operator: str, points: Sequence[tuple[int, ...]]) -> Design:
    spec = find_operator(operator)
    columns = {name: np.array(points)[:, place] for place, name in enumerate(spec.dim_names)}
    target = Target(device=find_device("a100_sxm_80"), dtype=DType.BF16)
    return build_design(spec, columns, target)


def gemm_grid() -> Design:
    return design_of("gemm", [(int(m), n, k) for m in ROWS for n, k in SHAPES])


def splits_of(design: Design, kind: SplitKind, operator: str = "gemm") -> list[Split]:
    splits = split_points(find_operator(operator), design, seed=0)
    return [split for split in splits if split.kind is kind]


@pytest.mark.parametrize("kind", SplitKind)
def test_no_point_is_both_inside_and_outside(kind: SplitKind) -> None:
    design = gemm_grid()
    splits = splits_of(design, kind)
    assert splits
    for split in splits:
        assert not np.isin(split.outside, split.inside).any()
        assert len(split.group) == len(split.outside)
        is_all = len(split.inside) + len(split.outside) == design.num_rows
        assert is_all or kind is SplitKind.BEYOND


def test_random_points_are_left_out_one_by_one() -> None:
    for split in splits_of(gemm_grid(), SplitKind.RANDOM):
        assert len(np.unique(split.group)) == len(split.outside)


def test_whole_values_between_the_ends_are_left_out() -> None:
    design = gemm_grid()
    for split in splits_of(design, SplitKind.SIZES):
        left = np.unique(design.points[split.outside, 0])
        kept = np.unique(design.points[split.inside, 0])
        assert not np.isin(left, kept).any()
        assert kept.min() < left.min()
        assert left.max() < kept.max()


def test_whole_configurations_are_left_out() -> None:
    design = gemm_grid()
    for split in splits_of(design, SplitKind.CONFIGURATIONS):
        left = {tuple(row) for row in design.points[split.outside, 1:].tolist()}
        kept = {tuple(row) for row in design.points[split.inside, 1:].tolist()}
        assert not left & kept


def test_two_configurations_are_too_few_to_leave_one_out() -> None:
    design = design_of("gemm", [(int(m), n, 4096) for m in ROWS for n in (1024, 2048)])
    assert splits_of(design, SplitKind.CONFIGURATIONS) == []


def test_octaves_of_a_sequences_length_are_peeled_off() -> None:
    """Not of the sum over the batch: a long batch is made of short sequences, too."""
    lengths, heads = 2 ** np.arange(4, 13), (32, 8, 128)
    points = [
        (*prefill_dims(num_seqs, int(q_len), 0).values(), *heads)
        for q_len in lengths
        for num_seqs in (1, 2, 4, 8)
    ]
    design = design_of("attention_prefill", points)
    q_len = design.points[:, 1] // design.points[:, 0]
    peeled = [
        (np.unique(q_len[split.outside]).tolist(), int(q_len[split.inside].max()))
        for split in splits_of(design, SplitKind.BEYOND, "attention_prefill")
    ]
    assert peeled == [([4096], 2048), ([2048], 1024)]


def test_a_densely_measured_configuration_loses_an_octave_of_its_own() -> None:
    short, long = range(10, 400, 10), range(10, 800, 10)
    points = [(m, 4096, 4096) for m in short] + [(m, 8192, 4096) for m in long]
    design = design_of("gemm", points)
    split, _ = splits_of(design, SplitKind.BEYOND)
    left = design.points[split.outside]
    assert {
        n: (int(left[left[:, 1] == n, 0].min()), int(left[left[:, 1] == n, 0].max()))
        for n in (4096, 8192)
    } == {4096: (200, 390), 8192: (400, 790)}


def test_runs_are_left_out_where_values_number_the_points() -> None:
    """Many values next to each other: a hole, not a step of the sweep."""
    design = design_of("gemm", [(m, 4096, 4096) for m in range(1, 2001)])
    for split in splits_of(design, SplitKind.SIZES):
        rows = np.sort(split.outside)
        run_lengths = np.diff(np.flatnonzero(np.diff(np.concatenate([[-9], rows, [9999]])) > 1))
        assert run_lengths.min() >= 2
        assert 0 not in rows
        assert design.num_rows - 1 not in rows


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        (SplitKind.RANDOM, Tier.GRID),
        (SplitKind.SIZES, Tier.GAP),
        (SplitKind.BEYOND, Tier.BEYOND),
    ],
)
def test_what_is_left_out_is_asked_as_the_tier_it_teaches(kind: SplitKind, tier: Tier) -> None:
    design = gemm_grid()
    for split in splits_of(design, kind):
        known, asked = design.take(split.inside), design.take(split.outside)
        coverage = map_coverage(find_operator("gemm"), known.points, known.axes)
        tiers = coverage.tiers(asked, PointIndex(known.points).find(asked))
        assert np.median(tiers) == tier


def test_equal_seeds_leave_out_equal_points() -> None:
    first, second = (
        [split.outside.tolist() for split in split_points(find_operator("gemm"), gemm_grid(), 5)]
        for _ in range(2)
    )
    assert first == second


def folds_of(design: Design) -> list[Fold]:
    splits = list(split_points(find_operator("gemm"), design, seed=0))
    return list(share_models(splits, design.num_rows))


def dense_grid() -> Design:
    return design_of("gemm", [(8 * m, n, k) for m in range(1, 101) for n, k in SHAPES])


def test_one_model_answers_for_a_split_of_every_kind() -> None:
    design = dense_grid()
    kinds = [[split.kind for split in fold.splits] for fold in folds_of(design)]
    assert list(SplitKind) == kinds[0]
    assert all(len(set(together)) == len(together) for together in kinds)
    every = [split.kind for split in split_points(find_operator("gemm"), design, seed=0)]
    found = [kind for together in kinds for kind in together]
    assert {kind: every.count(kind) for kind in every} == {
        kind: found.count(kind) for kind in every
    }


def test_a_shared_model_knows_nothing_of_what_it_is_asked_and_each_point_has_one_reason() -> None:
    for fold in folds_of(dense_grid()):
        outside = [row for split in fold.splits for row in split.outside.tolist()]
        assert len(set(outside)) == len(outside)
        assert not set(outside) & set(fold.inside.tolist())
        assert all(len(split.group) == len(split.outside) for split in fold.splits)


def test_few_points_are_not_thinned_further_by_sharing() -> None:
    design = design_of(
        "gemm", [(8 * m, n, k) for m in range(1, 60 // len(SHAPES)) for n, k in SHAPES]
    )
    splits = list(split_points(find_operator("gemm"), design, seed=0))
    folds = folds_of(design)
    assert len(splits) == len(folds)
    assert [split.inside.tolist() for split in splits] == [fold.inside.tolist() for fold in folds]


def test_too_few_points_are_not_split() -> None:
    design = design_of("gemm", [(int(m), 4096, 4096) for m in ROWS[:4]])
    assert list(split_points(find_operator("gemm"), design, seed=0)) == []


def test_rows_are_thinned_to_so_many_of_them_in_order() -> None:
    rows = np.arange(100) * 3
    thin = thin_rows(rows, 60, np.random.default_rng(0))
    assert 60 == len(set(thin.tolist()) & set(rows.tolist()))
    assert (np.diff(thin) > 0).all()
    assert rows is thin_rows(rows, 100, np.random.default_rng(0))


def test_values_are_left_out_along_an_axis_that_points_share() -> None:
    """Not along one that nearly numbers them, though it has more values."""
    rng = np.random.default_rng(1)
    points = [
        (int(rows), 1024 + place, 4096)
        for place, rows in enumerate(np.repeat(ROWS, 9)[rng.permutation(len(ROWS) * 9)])
    ]
    design = design_of("gemm", points)
    found = splits_of(design, SplitKind.SIZES)
    assert found
    for split in found:
        rows = design.points[:, 0]
        assert set() == set(rows[split.inside].tolist()) & set(rows[split.outside].tolist())
