"""Intervals, number by number: tables of answers in addition to the laws that intervals obey."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from golden_table import Row, check_golden

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.calibration import (
    HeldOutErrors,
    calibrate,
    half_width,
    held_out_bounds,
    join_errors,
    quantiles,
)
from foretoken.predictor.intervals.coverage import Tier, map_coverage
from foretoken.predictor.intervals.holdout import split_points
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.roofline import Target

_GOLDEN_RATIO = 0.6180339887498949


def _errors(num_rows: int, tier: Tier, *, per_group: int = 1, scale: float = 0.1) -> HeldOutErrors:
    """Return errors that fill their range evenly, wider for small calls and telling spreads."""
    place = np.arange(num_rows)
    even = np.mod(place * _GOLDEN_RATIO, 1.0)
    base_us = 1.0 + 300.0 * np.mod(place * np.sqrt(2.0), 1.0)
    spread_log = 0.02 + 0.2 * np.mod(place * np.sqrt(3.0), 1.0)
    return HeldOutErrors(
        error_log=scale * (2.0 * even - 1.0) * (1.0 + 100.0 / base_us) * spread_log**0.5,
        spread_log=spread_log,
        base_us=base_us,
        octaves=np.mod(place, 3) * 0.8,
        tier=np.full(num_rows, tier),
        group=place // per_group,
        fold=place % 3,
    )


_ERRORS = {
    "grid alone": [_errors(60, Tier.GRID)],
    "large and small calls": [_errors(450, Tier.GRID)],
    "all tiers": [_errors(80, tier, scale=0.1 * (1 + tier)) for tier in Tier],
    "a surer tier": [_errors(80, Tier.GRID), _errors(40, Tier.BEYOND, scale=0.01)],
    "no grid": [_errors(40, Tier.NEW_CONFIGURATION)],
    "three of the grid": [_errors(3, Tier.GRID), _errors(30, Tier.BEYOND)],
    "four of the grid": [_errors(4, Tier.GRID), _errors(30, Tier.BEYOND)],
    "one group": [_errors(50, Tier.GRID), _errors(12, Tier.GAP, per_group=12)],
    "groups": [_errors(120, Tier.GRID, per_group=6)],
    "many groups": [_errors(60, Tier.GRID, per_group=2)],
}


@pytest.mark.parametrize("part", ["calibration", "bounds"])
def test_bounds_are_as_kept(part: str) -> None:
    rows: list[Row] = []
    for name, parts in _ERRORS.items():
        errors = join_errors(parts)
        if part == "calibration":
            found = calibrate(errors)
            tiers = {tier.name.lower(): float(found.tier_log[tier]) for tier in Tier}
            ratios = " ".join(f"{ratio:.9g}" for ratio in found.bin_ratio)
            edges = " ".join(f"{edge:.9g}" for edge in found.bin_edges_us)
            shape = {"power": found.spread_power, "ratios": ratios, "edges": edges}
            rows.append({"errors": name, **tiers, **shape})
            continue
        scores = np.abs(errors.error_log)
        low, high = quantiles(errors.error_log, errors.group)
        held = held_out_bounds(errors)
        width = half_width(scores, errors.group)
        bounds = {"half_width": width, "low": low, "high": high}
        rows.append({"errors": name, **bounds, "first": float(held[0]), "sum": float(held.sum())})
    check_golden(f"interval_{part}", rows)


def test_what_is_assumed_without_errors() -> None:
    """A fifth of a log unit on the grid; twice, 2.5, three and four times that elsewhere."""
    assert calibrate(None).tier_log.tolist() == pytest.approx([0.2, 0.4, 0.5, 0.6, 0.8])
    assert calibrate(None).doubt(np.array([0.3]), np.array([5.0]), np.array([0.5])).tolist() == [1]


def test_parts_that_are_joined_keep_their_groups_and_folds_apart() -> None:
    joined = join_errors([_errors(4, Tier.GRID, per_group=2), _errors(3, Tier.GAP)])
    assert [0, 0, 1, 1, 2, 3, 4] == joined.group.tolist()
    assert [0, 1, 2, 0, 3, 4, 5] == joined.fold.tolist()


def _design(operator: str, points: Sequence[tuple[int, ...]]) -> Design:
    spec = find_operator(operator)
    columns = {name: np.array(points)[:, place] for place, name in enumerate(spec.dim_names)}
    target = Target(device=find_device("a100_sxm_80"), dtype=DType.BF16)
    return build_design(spec, columns, target)


def _gemms(rows: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    return [(m, n, k) for m in rows for n, k in shapes]


def _prefills(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    heads = ((32, 8, 128), (16, 4, 128), (8, 8, 64))
    return [
        (*prefill_dims(num_seqs, length, 0).values(), *each)
        for num_seqs, length, each in itertools.product((1, 2, 4, 8), lengths, heads)
    ]


_POWERS = [2**power for power in range(12)]
_HOLED = [m for m in range(8, 640, 8) if not 200 < m < 300]
_SQUARES = [(n, k) for n in (1024, 4096, 6144) for k in (1024, 4096)]
_MEASURED = {
    "powers": ("gemm", _gemms(_POWERS, _SQUARES)),
    "a hole": ("gemm", _gemms(_HOLED, [(4096, 4096)])),
    "ranges": ("gemm", _gemms(_HOLED, [(1024, 4096)]) + _gemms(_HOLED[:30], [(4096, 1024)])),
    "three values": ("gemm", _gemms([16, 32, 512], _SQUARES)),
    "one value": ("gemm", _gemms([64], _SQUARES)),
    "scattered": ("gemm", [(1 + 37 * i % 997, 1024 * (1 + i % 3), 2048) for i in range(120)]),
    "prefill": ("attention_prefill", _prefills([128, 256, 512, 2048, 4096])),
}
_ASKED_ROWS = (1, 3, 24, 48, 64, 96, 100, 208, 250, 256, 296, 300, 513, 600, 700, 1500, 2500, 6000)
_ASKED = {
    "gemm": _gemms(_ASKED_ROWS, [(4096, 4096), (1024, 4096), (4096, 1024), (2048, 2048)]),
    "attention_prefill": _prefills([64, 128, 200, 512, 1024, 3000, 8192, 16384]),
}


def test_tiers_are_as_kept() -> None:
    """One digit a call: 0 on the grid, 1 in a gap, 2 a new configuration, 3 beyond, 4 far."""
    rows: list[Row] = []
    for name, (operator, points) in _MEASURED.items():
        measured, asked = _design(operator, points), _design(operator, _ASKED[operator])
        coverage = map_coverage(find_operator(operator), measured.points, measured.axes)
        tiers = coverage.tiers(asked, PointIndex(measured.points).find(asked)).tolist()
        text = "".join(map(str, tiers))
        groups = " ".join(text[start : start + 12] for start in range(0, len(text), 12))
        rows.append({"measured": name, "tiers": groups})
    check_golden("interval_tiers", rows)


def test_splits_are_as_kept() -> None:
    """How many rows a split trains on and leaves out, in how many groups, and which (their sum)."""
    rows: list[Row] = []
    for name, (operator, points) in _MEASURED.items():
        for split in split_points(find_operator(operator), _design(operator, points), seed=5):
            sizes = {"inside": len(split.inside), "outside": len(split.outside)}
            sums = {"rows": int(split.outside.sum()), "groups": len(np.unique(split.group))}
            rows.append({"measured": name, "kind": split.kind.value, **sizes, **sums})
    check_golden("interval_splits", rows)
