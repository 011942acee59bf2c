"""From catalog rows to series, and the ways to leave their points out."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from predictor_fakes import FakeCatalog, gemm_rows, row_of

from foretoken.domain.measurements.measurement import MeasurementFilter, Run, RunKind, RunSummary
from foretoken.predictor.recent_rows import read_recent
from foretoken.predictor.series import SeriesKey, build_series
from foretoken.predictor.software import matches
from foretoken.predictor.training_rows import read_series
from foretoken.wire.arrow import read_table

GEMM = SeriesKey("gemm", "a30", "", "fp16", "forward", "")


def test_frameworks_have_a_series_each_and_one_together() -> None:
    rows = [
        *gemm_rows(framework="vllm", framework_version="0.19.0"),
        *gemm_rows(framework="sglang"),
        row_of("rms_norm", {"num_tokens": 1, "hidden": 64}, 5.0, framework="vllm"),
    ]
    series = read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))
    found = [(item.key.operator, item.key.framework, len(item.points)) for item in series]
    assert found == [
        ("gemm", "", 64),
        ("gemm", "sglang", 64),
        ("gemm", "vllm 0.19.0", 64),
        ("rms_norm", "vllm", 1),
    ]


def test_at_each_point_the_fastest_kernel_counts() -> None:
    """By the median of its repeats; a point that only the slow kernel ran is kept."""
    dims, alone = {"m": 8, "n": 64, "k": 64}, {"m": 9, "n": 64, "k": 64}
    rows = [row_of("gemm", dims, us, kernel="graph") for us in (9.0, 10.0, 30.0)]
    rows += [row_of("gemm", dims, us, kernel="eager") for us in (8.0, 20.0, 21.0)]
    rows += [row_of("gemm", alone, 20.0, kernel="eager")]
    (series,) = read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))
    assert series.latency_us.tolist() == [10.0, 20.0]


def test_a_variant_is_a_series_of_its_own() -> None:
    dims = {"m": 8, "n": 64, "k": 64}
    rows = [row_of("gemm", dims, 10.0), row_of("gemm", dims, 2.0, variant="quant=int4_wo")]
    series = read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))
    found = {item.key.variant: item.latency_us.tolist() for item in series}
    assert found == {"": [10.0], "quant=int4_wo": [2.0]}


def test_calls_beside_others_are_not_trained_on() -> None:
    dims = {"m": 8, "n": 64, "k": 64}
    rows = [row_of("gemm", dims, 10.0)]
    for beside in ("beside=nothing;beside_dims=2x1", "beside=all_reduce;beside_dims=1024x2x1"):
        rows += [row_of("gemm", dims, 15.0, variant=beside)]
    rows += [row_of("gemm", dims, 9.0, variant="cache=warm")]
    series = read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))
    assert ["", "cache=warm"] == [item.key.variant for item in series]


def test_each_of_several_kernels_is_also_a_series_of_its_own() -> None:
    """The series without a kernel takes the fastest at every point."""
    rows = []
    for m in range(1, 11):
        dims = {"m": m, "n": 64, "k": 64}
        rows.append(row_of("gemm", dims, 10.0, kernel="cutlass"))
        rows.append(row_of("gemm", dims, 2.0 * m, kernel="cublas"))
    series = read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))
    found = {item.key.kernel: item.latency_us.tolist() for item in series}
    expected = {
        "": [min(10.0, 2.0 * m) for m in range(1, 11)],
        "cublas": [2.0 * m for m in range(1, 11)],
        "cutlass": [10.0] * 10,
    }
    assert found == expected


def test_rows_come_in_pieces_that_name_other_things() -> None:
    """What is encoded piece by piece means the same in the next piece."""
    pieces = [
        [*gemm_rows(framework="vllm", kernel="cutlass"), *gemm_rows(variant="quant=int4_wo")],
        [row_of("rms_norm", {"num_tokens": 1, "hidden": 64}, 5.0), *gemm_rows(kernel="cublas")],
        gemm_rows(framework="sglang", device="a100_sxm"),
    ]
    catalog = [FakeCatalog(rows).read_measurements(MeasurementFilter()) for rows in pieces]
    table = pa.concat_tables(read_table(stream) for stream in catalog)
    found = [(item.key.operator, item.key.framework, item.kernels) for item in read_series(table)]
    assert found == [
        ("gemm", "sglang", ()),
        ("gemm", "", ("cublas", "cutlass")),
        ("gemm", "", ()),
        ("gemm", "vllm", ("cutlass",)),
        ("rms_norm", "", ()),
    ]
    run = Run(run_id="r", kind=RunKind.IMPORT, tool="t", content_hash="")
    since = datetime(2026, 1, 1, tzinfo=UTC)
    tables = read_recent(table, RunSummary(run=run, started_at=""), since, step=1)
    assert sum(item.query.tables[0].num_rows for item in tables) == table.num_rows


def test_a_device_is_known_by_its_vendor_name_too() -> None:
    rows = gemm_rows(device="NVIDIA A30")
    series = read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))
    assert [item.key.device for item in series] == ["a30"]


def test_points_are_distinct_and_in_order_whatever_the_order_of_rows() -> None:
    points = np.array([[4, 8, 8], [2, 8, 8], [4, 8, 8], [4, 8, 8]])
    latency_us = np.array([10.0, 3.0, 11.0, 30.0])
    series = build_series(GEMM, points, latency_us)
    assert series.points.tolist() == [[2, 8, 8], [4, 8, 8]]
    assert series.latency_us.tolist() == [3.0, 11.0]
    again = build_series(GEMM, points[::-1], latency_us[::-1])
    assert again.content_hash == series.content_hash


def test_noise_is_how_far_one_more_measurement_would_lie() -> None:
    rng = np.random.default_rng(0)
    points = np.repeat(np.arange(1, 2001), 2)[:, None] * np.array([[1, 8, 8]])
    latency_us = 50.0 * rng.lognormal(0.0, 0.02, len(points))
    series = build_series(GEMM, points, latency_us)
    # 90 % of normal values lie within 1.645 deviations; the median of two is itself uncertain.
    assert series.noise_log == pytest.approx(1.645 * 0.02 * np.sqrt(1.5), rel=0.1)
    assert build_series(GEMM, points[::2], latency_us[::2]).noise_log == 0.0


@pytest.mark.parametrize(
    ("framework", "asked", "expected"),
    [
        ("vllm 0.19.0", "vllm", True),
        ("vllm 0.19.0", "vLLM 0.19", True),
        ("vllm 0.19.0", "vllm 0.1", False),
        ("vllm 0.19.0", "vllm 0.19.0", True),
        ("sglang 0.5", "vllm", False),
    ],
)
def test_a_framework_is_asked_for_by_name_and_version(
    framework: str, asked: str, *, expected: bool
) -> None:
    assert matches(framework, asked) is expected
