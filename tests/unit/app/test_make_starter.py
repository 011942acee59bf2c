"""The program that makes the starter: the same rows give the same bytes, thinned as it says."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.starter import StarterSeries
from foretoken.wire.arrow import rows_to_table

_PROGRAM = Path(__file__).resolve().parents[3] / "starter"
_RUN = Run(
    run_id="nvidia",
    kind=RunKind.IMPORT,
    tool="aiconfigurator",
    source="a wheel",
    environment={"archive_sha256": "0" * 64},
)


@pytest.fixture(scope="module")
def program() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_PROGRAM))
        return importlib.import_module("make_starter")


@pytest.fixture(scope="module")
def thinning(program: ModuleType) -> ModuleType:
    return importlib.import_module(program.choose_software.__module__)


@pytest.fixture
def catalog(tmp_path: Path, make_catalog_path: Callable[[Path], str]) -> CatalogService:
    """GEMMs of an H200, and of a B200 and a B300, whose tensor cores differ in FP4 alone."""
    service = CatalogService(
        CatalogConfig(path=make_catalog_path(tmp_path / "home"), num_threads=1)
    )
    service.open()
    rows = [
        *_gemms("h200_sxm", "bf16"),
        *_gemms("h200_sxm", "fp8"),
        *(row for device in ("b200", "b300") for row in _gemms(device, "fp4")),
        *(row for device in ("b200", "b300") for row in _gemms(device, "bf16")),
    ]
    batch = MeasurementBatch(batch_index=0, rows=rows_to_table(rows), is_last=True)
    list(service.record(_RUN, [batch]))
    return service


def _gemms(device: str, dtype: str) -> list[dict[str, Any]]:
    return [
        {
            "operator": "gemm",
            "phase": "forward",
            "dtype": dtype,
            "dims": {"m": 2**m, "n": 2**n, "k": 4096},
            "device": device,
            "framework": "vllm",
            "framework_version": "0.31.0",
            "latency_us_median": 50.0 + 2.0 ** (m + n) / 3e4,
            "status": "ok",
        }
        for m in range(3, 13)
        for n in range(8, 14)
    ]


def test_the_same_rows_give_the_same_bytes(
    program: ModuleType, catalog: CatalogService, tmp_path: Path
) -> None:
    """And of a B300 only what a B200 does not tell, times to within five in ten thousand."""
    for name in ("one", "two"):
        program.write_dataset(catalog, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in _files(tmp_path / "one"))
    assert files == sorted(path.relative_to(tmp_path / "two") for path in _files(tmp_path / "two"))
    assert [(tmp_path / "one" / name).read_bytes() for name in files] == [
        (tmp_path / "two" / name).read_bytes() for name in files
    ]
    made = StarterSeries(tmp_path / "one", tmp_path / "kept", PredictorConfig(state_folder=""))
    found = {(entry.key.device, entry.key.dtype) for entry in made.entries}
    assert {("b200", "bf16"), ("b200", "fp4"), ("b300", "fp4")} == {
        place for place in found if place[0] != "h200_sxm"
    }
    (key,) = (entry.key for entry in made.entries if entry.key.dtype == "fp8")
    series = made.read_series(key)
    expected = 50.0 + series.columns["m"] * series.columns["n"] / 3e4
    np.testing.assert_allclose(series.latency_us, expected, rtol=5e-4)


def test_tables_of_a_wheel_of_before_are_named_and_kept_where_they_differ(
    program: ModuleType, catalog: CatalogService, tmp_path: Path
) -> None:
    """Only in the formats that newer tables lack."""
    rows = [
        {**row, "framework_version": "0.17.0", "latency_us_median": 1.2 * row["latency_us_median"]}
        for dtype in ("fp4", "bf16")
        for row in _gemms("b200", dtype)
    ]
    batches = [
        MeasurementBatch(batch_index=0, rows=rows_to_table(rows)),
        MeasurementBatch(batch_index=1, rows=rows_to_table(rows[-2:]), is_last=True),
    ]
    before = replace(_RUN, run_id="before", source="a former wheel")
    list(catalog.record(before, map(program.keep_changed, batches)))
    program.write_dataset(catalog, tmp_path / "made")
    made = StarterSeries(tmp_path / "made", tmp_path / "kept", PredictorConfig(state_folder=""))
    found = {
        (entry.key.dtype, entry.key.framework)
        for entry in made.entries
        if entry.key.device == "b200"
    }
    assert found == {
        ("fp4", "vllm 0.17.0"),
        ("fp4", "vllm 0.31.0"),
        ("bf16", "vllm 0.31.0"),
    }
    manifest = json.loads((tmp_path / "made" / "_manifest.json").read_text(encoding="utf-8"))
    assert ["a former wheel and a wheel, thinned"] == [run["source"] for run in manifest["runs"]]


def test_older_software_is_kept_where_newer_does_not_tell(thinning: ModuleType) -> None:
    """The newest, that of other times, and that of other points; not what is nearly as fast."""
    known = {
        name: _series(name, slowdown, first)
        for name, slowdown, first in (
            ("vllm 0.31.0", 1.0, 1),
            ("vllm 0.25.0", 1.05, 1),
            ("vllm 0.24.0", 1.2, 1),
            ("vllm 0.17.0", 1.0, 8),
            ("trtllm 1.3.0rc20", 1.0, 1),
            ("trtllm 1.3.0rc9", 1.01, 1),
        )
    }
    kept = thinning.choose_software({series.key: series for series in known.values()})
    gone = {"vllm 0.25.0", "trtllm 1.3.0rc9"}
    assert gone == {name for name, series in known.items() if series.key not in kept}


def _series(framework: str, slowdown: float, first: int) -> Series:
    points = np.stack(np.meshgrid(np.arange(first, first + 10), [64], [4096]), -1).reshape(-1, 3)
    key = SeriesKey("gemm", "h200_sxm", "", "bf16", "forward", framework)
    return Series(key=key, points=points, latency_us=slowdown * points.sum(axis=1))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    share=st.floats(0.1, 1.0),
)
def test_a_sample_is_even_and_has_the_corners(
    thinning: ModuleType, sizes: list[int], share: float
) -> None:
    """Of a lattice, or any part of it that begins and ends where it does."""
    points = np.stack(np.meshgrid(*(np.arange(1, n + 1) for n in sizes), indexing="ij"), -1)
    points = points.reshape(-1, 3).astype(np.int64)
    key = SeriesKey("gemm", "h200_sxm", "", "bf16", "forward", "vllm 0.31.0")
    series = Series(key=key, points=points, latency_us=np.ones(len(points)))
    kept = thinning.sample(series.points, share)
    assert {0, len(points) - 1} <= set(kept.tolist())
    # Every run ends anywhere in a sequence whose share is off by one point at most, and corners
    # are on top.
    num_runs = max(sizes) ** 2
    assert abs(len(kept) - share * len(points)) <= 2 * num_runs + 8


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
