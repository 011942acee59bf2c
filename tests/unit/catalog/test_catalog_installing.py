"""Measurements that others publish are installed with what says whose they are."""

import contextlib
import hashlib
import json
import random
import shutil
import socket
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
from aiconfigurator_tables import GEMM, plan_rows, write_table

from foretoken.catalog.importing import ImportRequest, RawTable, find_importer
from foretoken.catalog.installing import (
    NVIDIA,
    NVIDIA_VERSION,
    InstallRequest,
    _download,
    open_install,
    open_kept,
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


def test_a_wheel_of_before_has_its_tables_as_text(tmp_path: Path) -> None:
    """Its 16 bits are bfloat16 under another name, and builds from source of a folder's release."""
    wheel = tmp_path / "aiconfigurator-0.8.0-py3-none-any.whl"
    row = {"framework": "VLLM", "version": "0.0.0.dev1", "device": "NVIDIA B200"}
    row["gemm_dtype"] = "float16"
    row |= {"op_name": "gemm", "kernel_source": "vllm_default", "m": "16", "n": "8192", "k": "8192"}
    row["latency"] = "0.0148"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = ",".join(row) + "\n" + ",".join(row.values()) + "\n"
        archive.writestr("aiconfigurator/systems/data/b200_sxm/vllm/0.17.0/gemm_perf.txt", text)
        archive.writestr("aiconfigurator-0.8.0.dist-info/METADATA", "Name: aiconfigurator\n")
    with open_install(InstallRequest(dataset=NVIDIA, wheel=wheel, systems="b200_sxm")) as plan:
        (found,) = plan_rows(plan)
    assert (pytest.approx(14.8), "0.17.0", "bf16") == (
        found["latency_us_median"],
        found["framework_version"],
        found["dtype"],
    )


def test_a_stub_is_called_one(tmp_path: Path) -> None:
    request = InstallRequest(dataset=NVIDIA, wheel=_write_wheel(tmp_path, ()))
    with (
        pytest.raises(InvalidRequestError, match="is a stub without tables"),
        open_install(request),
    ):
        pass


def test_a_wheel_that_unpacks_to_too_much_or_is_damaged_is_refused(tmp_path: Path) -> None:
    info, table = "a-1.dist-info/METADATA", "data/gemm_perf.parquet"
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(info, "Name: a\n" + " " * 2**22)
        archive.writestr(table, "")
    _assert_refused(InstallRequest(dataset=NVIDIA, wheel=wheel), "unpacks to more than")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(info, random.Random(1).randbytes(1000))  # noqa: S311
    content = bytearray(wheel.read_bytes())
    content[100:600] = bytes(500)
    wheel.write_bytes(content)
    _assert_refused(InstallRequest(dataset=NVIDIA, wheel=wheel), "no wheel that can be read")


def _assert_refused(request: InstallRequest, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match), open_install(request):
        pass


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (("a", "a/b"), "Not a directory|File exists"),
        (("x/./../../y",), "leads out"),
        (("nul\x01l",), "leads out"),
        (("a" * 300,), "leads out"),
    ],
)
def test_an_archive_whose_names_no_folder_can_have_is_refused(
    tmp_path: Path, names: tuple[str, ...], match: str
) -> None:
    path = tmp_path / "dataset.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    _assert_refused(InstallRequest(dataset=str(path)), match)


def test_a_single_file_of_a_dataset_is_refused_and_the_folder_named(tmp_path: Path) -> None:
    path = tmp_path / "part-0.parquet"
    path.write_bytes(b"PAR1")
    _assert_refused(InstallRequest(dataset=str(path)), "folder with their _manifest.json")


class _Endless(BaseHTTPRequestHandler):
    """Says that a dataset is longer than it is, or is of no length."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        if self.path == "/short.zip":
            self.send_header("Content-Length", "100")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1 if self.path == "/short.zip" else 64):
                self.wfile.write(bytes(2**20 if self.path == "/long.zip" else 10))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_download_that_ends_early_or_is_too_long_is_refused(tmp_path: Path, address: str) -> None:
    _assert_refused(InstallRequest(dataset=f"{address}/short.zip"), "ended 90 bytes early")
    _assert_refused(InstallRequest(dataset="http://[::1/x.zip"), "Invalid IPv6 URL")
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        _download(f"{address}/long.zip", tmp_path / "long.zip", max_bytes=2**20)


@pytest.mark.slow
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


class _Cancelled(Exception):  # noqa: N818 - of this test
    """Nobody wants it any more."""


def test_a_download_ends_when_it_is_not_wanted_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an index that says nothing for minutes, of an address without an end; nothing is left."""
    pytest.importorskip("pip")
    heard: list[str] = []

    def hear(_ratio: float, said: str) -> None:
        heard.append(said)
        if len(heard) > 1:
            raise _Cancelled

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        began = time.monotonic()
        with pytest.raises(_Cancelled), open_install(InstallRequest(dataset=NVIDIA), hear):
            pass
        assert time.monotonic() - began < 20
    assert "downloading: 0 MB so far" == heard[0]
    assert [] == list(tmp_path.iterdir())


def test_a_download_says_how_far_it_is(tmp_path: Path, address: str) -> None:
    heard: list[tuple[float, str]] = []

    def hear(ratio: float, said: str) -> None:
        heard.append((ratio, said))
        if ratio == 0.1:
            raise _Cancelled

    with pytest.raises(_Cancelled):
        _download(f"{address}/short.zip", tmp_path / "short.zip", hear)
    assert [(0.1, "downloading: 0 of 0 MB")] == heard
    with (
        pytest.raises(_Cancelled),
        open_install(InstallRequest(dataset=f"{address}/short.zip"), hear),
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
    # A folder that the user made stays, as a link to one does.
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("own", "link"):
        with pytest.raises(InvalidRequestError, match="nobody said the licence"):
            publish_dataset(catalog, tmp_path / name, _ALL, "")
    assert [] == list((tmp_path / "link").iterdir())
    publish_dataset(catalog, tmp_path / "out", _ALL, "CC-BY-4.0")
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert ["CC-BY-4.0"] == [run["licence"] for run in manifest["runs"]]


def test_what_was_kept_as_files_is_read_once_there_are_operators(
    tmp_path: Path, catalog: CatalogService
) -> None:
    """Under the names the files had, of whom they are, and no more than once."""
    with open_install(InstallRequest(dataset=NVIDIA, wheel=_write_wheel(tmp_path))) as plan:
        list(catalog.record(plan.run, plan.batches))
    with pytest.raises(InvalidRequestError, match="kept no tables"), open_kept(catalog):
        pass
    place = "h200_sxm/gemm/vllm/0.25.0/gemm_perf.parquet"
    _keep(catalog, write_table(tmp_path / place, {**GEMM, "version": "0.25.0"}), place)
    _keep(catalog, write_table(tmp_path / "unknown_perf.parquet", GEMM), "unknown_perf.parquet")
    for expected in (False, True):
        with open_kept(catalog) as plan:
            receipts = list(catalog.record(plan.run, plan.batches))
        assert [expected] == [receipt.was_duplicate for receipt in receipts]
    assert (f"aisimulate {NVIDIA_VERSION}", "Apache-2.0") == (plan.run.source, plan.run.licence)
    rows = read_table(catalog.read_measurements(_ALL))
    columns = (rows[name].to_pylist() for name in ("framework_version", "source_file"))
    found = zip(*columns, strict=True)
    assert [place] == [name.partition("/")[2] for version, name in found if version == "0.25.0"]


def _keep(catalog: CatalogService, path: Path, source_file: str) -> None:
    """Keep a table as an importer without an operator for it does."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    facts = {"tool": "aiconfigurator", "source_file": source_file}
    RawTable(
        name=f"kept.{digest[:16]}",
        num_rows=1,
        content_hash=digest,
        facts=facts,
        read=lambda: content,
    ).store(catalog)
