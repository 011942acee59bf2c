"""Measurements that others publish are installed with what says whose they are."""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from aiconfigurator_tables import GEMM, plan_rows, write_table

from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.installing import (
    NVIDIA,
    NVIDIA_VERSION,
    InstallRequest,
    open_install,
    publish_dataset,
)
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.wire.arrow import read_table

_ALL = MeasurementFilter(include_flagged=True)
_TABLES = ("h200_sxm/gemm/vllm/0.24.0", "b200_sxm/gemm/trtllm/1.0")


def _write_wheel(folder: Path, tables: tuple[str, ...] = _TABLES) -> Path:
    """Write a wheel as pip takes it, with a row in each table."""
    info = f"aisimulate-{NVIDIA_VERSION}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: aisimulate\nVersion: {NVIDIA_VERSION}\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"aisimulate-{NVIDIA_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for place in tables:
            table = write_table(folder / place / "gemm_perf.parquet", {**GEMM, "kernel": place})
            archive.write(table, f"aisimulate_core/systems/data/{place}/gemm_perf.parquet")
            shutil.rmtree(folder / place.split("/")[0])
        archive.writestr(f"{info}/METADATA", f"{metadata}License-Expression: Apache-2.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_a_wheel_says_what_and_whose_it_is(tmp_path: Path) -> None:
    wheel = _write_wheel(tmp_path)
    with open_install(InstallRequest(dataset=NVIDIA, wheel=wheel)) as plan:
        assert {"h200_sxm": 1, "b200": 1} == plan.device_rows
        assert 2 == len(plan_rows(plan))
    assert (f"aisimulate {NVIDIA_VERSION}", "Apache-2.0") == (plan.run.source, plan.run.licence)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert digest == plan.run.environment["archive_sha256"]


def test_systems_and_engines_narrow_it(tmp_path: Path) -> None:
    wheel = _write_wheel(tmp_path)
    for request in (
        InstallRequest(dataset=NVIDIA, wheel=wheel, systems="h200"),
        InstallRequest(dataset=NVIDIA, wheel=wheel, engines="sglang,vllm/0.24.0"),
    ):
        with open_install(request) as plan:
            assert {"h200_sxm": 1} == plan.device_rows


def test_a_stub_is_called_one(tmp_path: Path) -> None:
    request = InstallRequest(dataset=NVIDIA, wheel=_write_wheel(tmp_path, ()))
    with (
        pytest.raises(InvalidRequestError, match="is a stub without tables"),
        open_install(request),
    ):
        pass


def test_pip_brings_the_wheel_from_the_index_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")
    _write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with open_install(InstallRequest(dataset=NVIDIA)) as plan:
        assert 2 == len(plan_rows(plan))
    absent = InstallRequest(dataset=NVIDIA, version="9.9")
    with (
        pytest.raises(InvalidRequestError, match=r"no wheel of aisimulate 9\.9"),
        open_install(absent),
    ):
        pass


def test_what_only_nvidias_tables_have_is_refused_of_others() -> None:
    with pytest.raises(InvalidRequestError, match="are those of `nvidia`"):
        InstallRequest(dataset="folder", engines="vllm")


def test_what_was_published_is_installed(tmp_path: Path, catalog: CatalogService) -> None:
    """As a folder or a ZIP archive of it: the same rows, with source and licence."""
    with open_install(InstallRequest(dataset=NVIDIA, wheel=_write_wheel(tmp_path))) as plan:
        list(catalog.record(plan.run, plan.batches))
    folder = tmp_path / "out" / "published"
    report = publish_dataset(catalog, folder, _ALL, "")
    assert 2 == report.num_rows
    card = (folder / "README.md").read_text()
    assert "| h200_sxm | gemm | 2 |" in card
    assert "- apache-2.0" in card
    archive = Path(shutil.make_archive(str(tmp_path / "published"), "zip", tmp_path / "out"))
    stored = read_table(catalog.read_measurements(_ALL))["latency_us_median"].to_pylist()
    for place in (str(folder), str(archive)):
        with open_install(InstallRequest(dataset=place)) as plan:
            rows = pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])
            assert sorted(stored) == sorted(rows["latency_us_median"].to_pylist())
            assert (f"aisimulate {NVIDIA_VERSION}", "Apache-2.0") == (
                plan.run.source,
                plan.run.licence,
            )


def test_rows_without_a_licence_are_not_published(tmp_path: Path, catalog: CatalogService) -> None:
    write_table(tmp_path / "data" / "gemm_perf.parquet", GEMM)
    plan = find_importer("aiconfigurator").read(ImportRequest(path=tmp_path / "data"))
    list(catalog.record(plan.run, plan.batches))
    with pytest.raises(InvalidRequestError, match="nobody said the licence"):
        publish_dataset(catalog, tmp_path / "out", _ALL, "")
    assert not (tmp_path / "out").exists()
    publish_dataset(catalog, tmp_path / "out", _ALL, "CC-BY-4.0")
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert ["CC-BY-4.0"] == [run["licence"] for run in manifest["runs"]]
