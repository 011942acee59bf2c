"""The yardstick measures what it says: cuts hold out what they name, tables do not mix."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from accuracy.cut import (
    Cut,
    dimension,
    hold_out_beyond,
    hold_out_gaps,
    hold_out_groups,
    hold_out_octave,
    hold_out_random,
    hold_out_values,
)
from accuracy.device_ratio import common_rows, divide
from accuracy.line import Figure, Scores
from accuracy.table import split_into_tables
from accuracy.trial import Score

from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.series import SeriesKey, build_series
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

_M, _N = (column.ravel() for column in np.meshgrid(2 ** np.arange(10), [64, 96, 128, 192, 256]))
_COLUMNS = {"m": _M, "n": _N, "k": 2 * _N}


def _rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("cut", [hold_out_values(dimension("m")), hold_out_gaps(dimension("m"))])
def test_whole_values_are_held_out_and_never_the_ends(cut: Cut) -> None:
    """Leaving an end out would ask for an extrapolation."""
    is_out = cut(_COLUMNS, _rng())
    assert set() == set(_M[is_out]) & (set(_M[~is_out]) | {_M.min(), _M.max()})
    assert 0 < is_out.sum() < len(_M)


def test_whole_groups_are_held_out_together() -> None:
    is_out = hold_out_groups("n", "k")(_COLUMNS, _rng())
    assert set() == set(_N[is_out]) & set(_N[~is_out])
    assert 10 == is_out.sum()


def test_one_group_cannot_be_held_out() -> None:
    columns = {"m": np.arange(20), "n": np.ones(20, dtype=np.int64)}
    assert not hold_out_groups("n")(columns, _rng()).any()


def test_beyond_is_above_half_the_largest_of_each_group() -> None:
    columns = {"m": np.array([1, 2, 4, 10, 20, 40]), "n": np.array([0, 0, 0, 1, 1, 1])}
    is_out = hold_out_beyond(dimension("m"), "n")(columns, _rng())
    assert [4, 40] == columns["m"][is_out].tolist()


def test_an_octave_is_held_out_between_others() -> None:
    is_out = hold_out_octave("m")(_COLUMNS, _rng())
    assert 5 == is_out.sum()
    assert _M.min() < _M[is_out].min() <= _M[is_out].max() < _M.max()


def test_the_same_seed_holds_out_the_same_points() -> None:
    first, again = (hold_out_random(_COLUMNS, _rng()) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert 10 == first.sum()


def test_variants_and_kernels_are_tables_of_their_own() -> None:
    """A row of one never lands among those of another; a repeat is a point, and a ratio."""
    rows = [_row(8, 10.0, None, "a"), _row(8, 11.0, None, "a"), _row(8, 50.0, "quant=int8_wo", "a")]
    rows += [_row(16, 20.0, None, "a"), _row(16, 70.0, None, "b")]
    found = split_into_tables(pa.Table.from_pylist(rows, MEASUREMENT_SCHEMA), min_points=1)
    tables = sorted(found, key=lambda table: table.name)
    assert [[10.5, 20.0], [50.0], [70.0]] == [t.series.latency_us.tolist() for t in tables]
    assert pytest.approx([0.1]) == tables[0].repeat_ratios.tolist()
    assert [0, 0] == [len(table.repeat_ratios) for table in tables[1:]]


def test_a_line_is_the_median_over_tables_of_means_over_seeds() -> None:
    scores = Scores()
    for table, errors in {"a": (0.01, 0.03), "b": (0.10, 0.10), "c": (0.05, 0.05)}.items():
        for seed, mape in enumerate(errors):
            one = Score(
                mape=mape, p90=2 * mape, coverage=0.9, width=mape, outside=0.0, num_points=7
            )
            scores.add(table, seed, one)
    line = scores.summarise("f", "s", "", None)
    assert line is not None
    assert Figure(pytest.approx(5.0), pytest.approx(10.0)) == line.found
    assert pytest.approx(100.0 * (0.02 + 0.10 + 0.05) / 3) == line.width
    assert (3, 42) == (line.num_tables, line.num_points)


def test_devices_are_compared_at_points_that_both_have() -> None:
    first, second = (
        build_series(
            SeriesKey("cast", device, "", "bf16", "forward", "vllm 1.0"),
            np.array(points, dtype=np.int64).reshape(-1, 1),
            np.ones(len(points)),
        )
        for device, points in (("h200_sxm", [1, 2, 4, 8]), ("b200", [16, 8, 2]))
    )
    rows = common_rows(first, second)
    both = [
        series.points[own, 0].tolist() for series, own in zip((first, second), rows, strict=True)
    ]
    assert [[2, 8], [2, 8]] == both


def test_errors_of_two_devices_meet_as_squares() -> None:
    first, second = (
        LatencyColumns(
            latency_us=np.array([us]),
            low_us=np.array([us / off]),
            high_us=np.array([us * off]),
            provenance=np.array([Provenance.INTERPOLATED.value]),
        )
        for us, off in ((60.0, np.exp(0.3)), (20.0, np.exp(0.4)))
    )
    ratio = divide(first, second)
    found = [ratio.low_us[0], ratio.latency_us[0], ratio.high_us[0]]
    assert pytest.approx([3.0 * np.exp(-0.5), 3.0, 3.0 * np.exp(0.5)]) == found


def _row(m: int, latency_us: float, variant: str | None, kernel: str) -> dict[str, object]:
    dims = [(name, m if name == "m" else 64) for name in find_operator("gemm").dim_names]
    return {
        "operator": "gemm",
        "device": "a100_sxm_80",
        "dtype": "bf16",
        "phase": "forward",
        "framework": "vllm",
        "framework_version": "1.0",
        "kernel": kernel,
        "variant": variant,
        "dims": dims,
        "latency_us_median": latency_us,
    }
