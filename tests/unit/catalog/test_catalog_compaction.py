"""A compaction changes nothing but the room, whatever is written meanwhile."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, run, table
from quality_rows import residual_adds

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.attachment import FileAttachment
from foretoken.catalog.upkeep.backup import CatalogCopy
from foretoken.catalog.upkeep.compaction import compact, replace_by
from foretoken.domain.measurements.measurement import (
    Artifact,
    MeasurementFilter,
    PruneRequest,
    RunKind,
)
from foretoken.wire.arrow import read_table

_EVERYTHING = MeasurementFilter(include_failed=True, include_flagged=True)
_KIND = "latency_models"
# No test waits for so long: whoever does hangs.
_NEVER_S = 3600.0


class _Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.days = 0.0

    def __call__(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=self.days)


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def _store_file(catalog: CatalogService, name: str, content: bytes) -> None:
    artifact = Artifact(
        kind=_KIND,
        name=name,
        content_hash=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        created_at="2026-01-02T03:04:05.678+00:00",
    )
    catalog.store_artifact(artifact, [content])


def _record_sums(catalog: CatalogService, run_id: str, **slip: int) -> None:
    list(catalog.record(run(run_id, RunKind.IMPORT), batches(table(residual_adds(**slip)[3]))))


@pytest.fixture
def catalog(catalog_path: str, clock: _Clock) -> Iterator[CatalogService]:
    """A catalog with something of everything: runs, an older one, files, a snapshot, flags."""
    service = CatalogService(CatalogConfig(path=catalog_path, num_threads=1), clock)
    service.open()
    list(service.record(run("old"), batches(gemms(range(1, 101)), gemms(range(1, 51)))))
    clock.days = 40
    list(service.record(run("new"), batches(gemms(range(200, 300)), is_complete=False)))
    _store_file(service, "kept", b"content")
    _store_file(service, "changed", b"first")
    service.create_snapshot(MeasurementFilter(run_id="new"), "holder")
    _record_sums(service, "sums-1")
    _record_sums(service, "sums-2", slip=4000)
    yield service
    service.close()


def _tables(catalog: CatalogService) -> dict[str, list[tuple[object, ...]]]:
    """Return all there is."""
    with catalog._store.cursor() as cursor:
        names = cursor.execute(
            "SELECT table_name FROM duckdb_tables() WHERE database_name = 'store'"
        ).fetchall()
        return {
            name: cursor.execute(f"SELECT * FROM {name} ORDER BY ALL").fetchall()  # noqa: S608
            for (name,) in names
        }


def _record_more(catalog: CatalogService) -> None:
    list(catalog.record(run("new"), batches(gemms(range(200, 300)), gemms([1, 2, 3]))))
    list(catalog.record(run("third"), batches(gemms([7]))))


def _prune(catalog: CatalogService) -> None:
    assert ("old",) == catalog.prune(PruneRequest(older_than_days=30)).deleted_run_ids


def _prune_and_record_again(catalog: CatalogService) -> None:
    _prune(catalog)
    list(catalog.record(run("old", content_hash="another"), batches(gemms([9]))))


def _record_and_prune_the_newest(catalog: CatalogService) -> None:
    """The highest batch number goes, and is not used again."""
    list(catalog.record(run("passing"), batches(gemms([5]))))
    catalog.prune(PruneRequest(older_than_days=0))
    list(catalog.record(run("last"), batches(gemms([6]))))


def _change_files(catalog: CatalogService) -> None:
    _store_file(catalog, "changed", b"second, and longer")
    _store_file(catalog, "added", b"third")
    catalog.activate_artifact(_KIND, "added")
    catalog.delete_artifact(_KIND, "kept")


def _delete_a_file_and_store_another(catalog: CatalogService) -> None:
    catalog.delete_artifact(_KIND, "kept")
    _store_file(catalog, "kept", b"of the same name")


def _hold_and_release(catalog: CatalogService) -> None:
    (old,) = catalog.list_snapshots()
    catalog.create_snapshot(MeasurementFilter(device="a30"), "another")
    catalog.release_snapshot(old.content_hash, "holder")


def _withdraw_a_flag(catalog: CatalogService) -> None:
    """Two runs more agree with the second: it was right, and the first stays flagged."""
    for number in (3, 4):
        _record_sums(catalog, f"sums-{number}", slip=4000)
    with catalog._store.cursor() as cursor:
        assert [(1,)] == cursor.execute("SELECT count(*) FROM doubt WHERE until > 0").fetchall()


_CHANGES = (
    lambda _catalog: None,
    _record_more,
    _prune,
    _prune_and_record_again,
    _record_and_prune_the_newest,
    _change_files,
    _delete_a_file_and_store_another,
    _hold_and_release,
    _withdraw_a_flag,
)


@pytest.mark.slow
@pytest.mark.parametrize("change", _CHANGES)
def test_what_is_written_while_the_copy_is_made_is_in_the_new_file(
    change: Callable[[CatalogService], None], catalog: CatalogService, tmp_path: Path
) -> None:
    path = tmp_path / "catalog.duckdb"
    inode = path.stat().st_ino
    store = catalog._store
    assert isinstance(store.attachment, FileAttachment)
    with CatalogCopy(store) as copy:
        change(catalog)
        expected = _tables(catalog)
        replace_by(copy, store, store.attachment, _NEVER_S)
    assert inode != path.stat().st_ino
    assert expected == _tables(catalog)
    catalog.close()
    catalog.open()
    assert expected == _tables(catalog)
    for artifact in catalog.list_artifacts(_KIND):
        assert artifact.num_bytes == len(b"".join(catalog.read_artifact(_KIND, artifact.name)))
    assert [] == list((tmp_path / "catalog.duckdb.tmp").glob("*"))


@pytest.mark.slow
def test_recording_goes_on_while_a_compaction_waits_for_a_reader(
    catalog: CatalogService, tmp_path: Path
) -> None:
    """The reader has the rows that it began with; then the new file has the recorded ones."""
    inode = (tmp_path / "catalog.duckdb").stat().st_ino
    before = read_table(catalog.read_measurements(_EVERYTHING)).num_rows
    reader = catalog.read_measurements(_EVERYTHING)
    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compact, catalog._store, _NEVER_S)
        for number in range(5):
            list(catalog.record(run(f"meanwhile-{number}"), batches(gemms([number + 1]))))
            assert not compacting.done()
        assert inode == (tmp_path / "catalog.duckdb").stat().st_ino
        assert before == read_table(reader).num_rows
        compacting.result()
    assert inode != (tmp_path / "catalog.duckdb").stat().st_ino
    assert before + 5 == read_table(catalog.read_measurements(_EVERYTHING)).num_rows


@pytest.mark.slow
def test_two_compactions_at_once_come_one_after_the_other(catalog: CatalogService) -> None:
    expected = _tables(catalog)
    with ThreadPoolExecutor(2) as pool:
        reports = [pool.submit(catalog.compact) for _ in range(2)]
    assert all(report.result().bytes_after for report in reports)
    assert expected == _tables(catalog)


def _stored_rows(path: Path) -> dict[str, int]:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    rows: pa.Table = read_table(service.read_measurements(_EVERYTHING))
    counts = rows.group_by("run_id").aggregate([([], "count_all")])
    service.close()
    return dict(zip(*(counts[name].to_pylist() for name in ("run_id", "count_all")), strict=True))


@pytest.mark.slow
def test_a_process_killed_at_any_line_of_a_compaction_loses_nothing(tmp_path: Path) -> None:
    """A thread records meanwhile: all it had acknowledged is there, once and whole."""
    path = tmp_path / "catalog.duckdb"
    program = Path(__file__).with_name("crashing_compaction.py")
    said = subprocess.run(
        [sys.executable, str(program), str(path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    ).stdout
    ends = [json.loads(line) for line in said.splitlines()]
    stored = _stored_rows(path)
    acknowledged = {run_id for _, run_ids in ends for run_id in run_ids}
    assert set() == acknowledged - stored.keys()
    assert {20} == set(stored.values())
    killed_in = {end[1] for end, _ in ends if end[0] == "killed"}
    assert {"compact", "__enter__", "replace_by", "_catch_up", "replace", "attach"} == killed_in
    assert [] == list((tmp_path / "catalog.duckdb.tmp").glob("*"))
