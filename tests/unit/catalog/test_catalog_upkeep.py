"""Pruning deletes what is old and not needed, whole or not at all; compacting gives room back."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.upkeep.compaction import compact
from foretoken.domain.errors import CatalogBusyError, InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter, PruneRequest, RunKind
from foretoken.wire.arrow import read_table

_START = datetime(2026, 1, 1, tzinfo=UTC)
_EVERYTHING = MeasurementFilter(include_failed=True, include_flagged=True)
_PRELUDE = """
import sys
from datetime import UTC, datetime, timedelta
sys.path.insert(0, sys.argv[2])
from catalog_rows import batches, gemms, run
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import PruneRequest
catalog = CatalogService(
    CatalogConfig(path=sys.argv[1], num_threads=1),
    lambda: datetime.now(UTC) + timedelta(days=100),
)
catalog.open()
print("open", flush=True)
"""


class _Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.days = 0.0

    def __call__(self) -> datetime:
        return _START + timedelta(days=self.days)


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def catalog(catalog_path: str, clock: _Clock) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=catalog_path, num_threads=1), clock)
    service.open()
    yield service
    service.close()


def _rows(catalog: CatalogService) -> pa.Table:
    return read_table(catalog.read_measurements(_EVERYTHING))


def _run_ids(catalog: CatalogService) -> set[str]:
    return {summary.run.run_id for summary in catalog.list_runs()}


def _kill_after(delay_s: float, script: str, path: Path) -> None:
    """Run a script on a catalog and kill it some time after it says that this is open."""
    command = [sys.executable, "-c", _PRELUDE + script, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "open\n" == process.stdout.readline()
        time.sleep(delay_s)
        process.kill()


def test_runs_older_than_asked_are_deleted_with_all_that_belongs_to_them(
    catalog: CatalogService, clock: _Clock
) -> None:
    list(catalog.record(run("old"), batches(gemms([1, 2]), gemms([3]))))
    clock.days = 20
    list(catalog.record(run("new"), batches(gemms([4]))))
    clock.days = 31
    report = catalog.prune(PruneRequest(older_than_days=30))
    assert (("old",), 3, (), 0) == (
        report.deleted_run_ids,
        report.num_deleted_rows,
        report.kept_run_ids,
        report.num_kept_rows,
    )
    assert {"new"} == _run_ids(catalog)
    assert [4] == [dict(dims)["m"] for dims in _rows(catalog).column("dims").to_pylist()]
    with catalog._store.cursor() as cursor:
        for name, num_rows in (("measurement", 1), ("batch", 1), ("run", 1), ("doubt", 0)):
            assert [(num_rows,)] == cursor.execute(f"SELECT count(*) FROM {name}").fetchall()  # noqa: S608
        assert [(30.0, 1, 3)] == cursor.execute(
            "SELECT older_than_days, num_runs, num_rows FROM pruning"
        ).fetchall()


def test_a_dry_run_says_the_same_and_deletes_nothing(
    catalog: CatalogService, clock: _Clock
) -> None:
    list(catalog.record(run("old"), batches(gemms([1, 2]))))
    clock.days = 31
    foretold = catalog.prune(PruneRequest(older_than_days=30, is_dry_run=True))
    assert 2 == _rows(catalog).num_rows
    assert foretold == catalog.prune(PruneRequest(older_than_days=30))
    assert 0 == _rows(catalog).num_rows


def test_its_last_batch_makes_a_run_as_old_as_it_is(catalog: CatalogService, clock: _Clock) -> None:
    first, last = batches(gemms([1]), gemms([2]))
    list(catalog.record(run("long"), [first]))
    clock.days = 25
    list(catalog.record(run("long"), [last]))
    clock.days = 31
    assert () == catalog.prune(PruneRequest(older_than_days=30)).deleted_run_ids
    clock.days = 56
    assert ("long",) == catalog.prune(PruneRequest(older_than_days=30)).deleted_run_ids


@pytest.mark.parametrize("kind", RunKind)
def test_a_run_that_may_still_be_sent_is_left_for_a_day(
    kind: RunKind, catalog: CatalogService, clock: _Clock
) -> None:
    list(catalog.record(run("unfinished", kind), batches(gemms([1]), is_complete=False)))
    list(catalog.record(run("whole", kind), batches(gemms([1]))))
    clock.days = 0.9
    assert ("whole",) == catalog.prune(PruneRequest(older_than_days=0)).deleted_run_ids
    clock.days = 1.1
    assert ("unfinished",) == catalog.prune(PruneRequest(older_than_days=0)).deleted_run_ids


def test_what_a_snapshot_selects_is_kept_whoever_holds_it(
    catalog: CatalogService, clock: _Clock
) -> None:
    list(catalog.record(run("a30"), batches(gemms([1, 2]))))
    list(catalog.record(run("a40"), batches(gemms([3], device="a40"))))
    snapshot = catalog.create_snapshot(MeasurementFilter(device="a40"))
    clock.days = 31
    report = catalog.prune(PruneRequest(older_than_days=30))
    assert (("a30",), ("a40",), 1) == (
        report.deleted_run_ids,
        report.kept_run_ids,
        report.num_kept_rows,
    )
    of_snapshot = MeasurementFilter(snapshot=snapshot.content_hash)
    assert 1 == read_table(catalog.read_measurements(of_snapshot)).num_rows
    catalog.delete_snapshot(snapshot.content_hash)
    assert ("a40",) == catalog.prune(PruneRequest(older_than_days=30)).deleted_run_ids


def test_what_is_recorded_after_a_pruning_is_no_part_of_an_older_snapshot(
    catalog: CatalogService, clock: _Clock
) -> None:
    """The counter of batches does not go back, though the highest are gone."""
    list(catalog.record(run("kept"), batches(gemms([1]))))
    list(catalog.record(run("gone"), batches(gemms([2], device="a40"), gemms([3], device="a40"))))
    snapshot = catalog.create_snapshot(MeasurementFilter(device="a30"))
    clock.days = 31
    assert ("gone",) == catalog.prune(PruneRequest(older_than_days=30)).deleted_run_ids
    list(catalog.record(run("new"), batches(gemms([4, 5]))))
    of_snapshot = MeasurementFilter(snapshot=snapshot.content_hash)
    rows = read_table(catalog.read_measurements(of_snapshot))
    assert [1] == [dict(dims)["m"] for dims in rows.column("dims").to_pylist()]


def test_a_device_and_a_tool_narrow_it(catalog: CatalogService, clock: _Clock) -> None:
    mixed = table(row(1, device="a30"), row(2, device="a40"))
    list(catalog.record(run("mixed"), batches(mixed)))
    list(catalog.record(run("a40"), batches(gemms([3], device="a40"))))
    clock.days = 31
    of_tool = PruneRequest(older_than_days=30, tool="other")
    of_device = PruneRequest(older_than_days=30, device="a40")
    assert () == catalog.prune(of_tool).deleted_run_ids
    assert ("a40",) == catalog.prune(of_device).deleted_run_ids
    assert {"mixed"} == _run_ids(catalog)


def test_a_pruned_run_can_be_recorded_again_while_a_reader_still_sees_the_old_one(
    catalog: CatalogService, clock: _Clock
) -> None:
    list(catalog.record(run("again"), batches(gemms(range(1, 2001)))))
    reader = catalog.read_measurements(_EVERYTHING)
    clock.days = 31
    catalog.prune(PruneRequest(older_than_days=30))
    (receipt,) = catalog.record(run("again"), batches(gemms([7])))
    assert (False, 1) == (receipt.was_duplicate, receipt.num_rows)
    assert 2000 == read_table(reader).num_rows
    assert 1 == _rows(catalog).num_rows


@pytest.mark.parametrize("days", [-1.0, float("nan"), float("inf"), 1e9])
def test_an_age_that_is_none_is_refused(days: float, catalog: CatalogService) -> None:
    with pytest.raises(InvalidRequestError, match="older_than_days"):
        catalog.prune(PruneRequest(older_than_days=days))


@pytest.mark.slow
def test_a_process_killed_while_it_prunes_deletes_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    seen = set()
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.3):
        catalog = CatalogService(CatalogConfig(path=str(path), num_threads=1))
        catalog.open()
        for name in ("a", "b"):
            list(catalog.record(run(name), batches(gemms(range(1, 10_001)))))
        catalog.close()
        _kill_after(delay_s, "catalog.prune(PruneRequest(older_than_days=30))", path)
        catalog.open()
        found = (_rows(catalog).num_rows, len(catalog.list_runs()))
        catalog.close()
        seen.add(found)
    assert {(0, 0), (20_000, 2)} >= seen


@pytest.mark.slow
def test_compacting_gives_room_back_and_changes_nothing_else(
    catalog: CatalogService, clock: _Clock, tmp_path: Path
) -> None:
    for number in range(6):
        rows = gemms([(n * 7919) % 8000 + 1 for n in range(20_000)], power_w=float(number))
        list(catalog.record(run(f"run-{number}"), batches(rows)))
        clock.days += 10
    snapshot = catalog.create_snapshot(MeasurementFilter())
    catalog.delete_snapshot(snapshot.content_hash)
    catalog.prune(PruneRequest(older_than_days=15))
    snapshot = catalog.create_snapshot(MeasurementFilter(), "model")
    before = _rows(catalog)
    report = catalog.compact()
    assert report.bytes_after < report.bytes_before / 2
    assert report.bytes_after == (tmp_path / "catalog.duckdb").stat().st_size
    assert before.equals(_rows(catalog))
    assert snapshot == catalog.describe_snapshot(MeasurementFilter())
    list(catalog.record(run("after"), batches(gemms([1]))))
    catalog.close()
    catalog.open()
    assert before.num_rows + 1 == _rows(catalog).num_rows
    assert [] == list((tmp_path / "catalog.duckdb.tmp").glob("*"))


def test_who_reads_all_the_time_keeps_it_from_being_compacted(
    catalog: CatalogService, tmp_path: Path
) -> None:
    list(catalog.record(run(), batches(gemms(range(1, 5001)))))
    inode = (tmp_path / "catalog.duckdb").stat().st_ino
    reader = catalog.read_measurements(_EVERYTHING)
    with pytest.raises(CatalogBusyError, match="with no break"):
        compact(catalog._store, idle_wait_s=0.05)
    assert inode == (tmp_path / "catalog.duckdb").stat().st_ino
    assert 5000 == read_table(reader).num_rows
    assert [] == list((tmp_path / "catalog.duckdb.tmp").glob("*"))
    compact(catalog._store, idle_wait_s=5)
    assert inode != (tmp_path / "catalog.duckdb").stat().st_ino


def test_recording_and_reading_go_on_after_the_file_was_changed_beneath_them(
    catalog: CatalogService,
) -> None:
    stopped = threading.Event()
    errors: list[Exception] = []
    counts = {"recorded": 0, "read": 0}

    def repeat(work: Callable[[], object], name: str) -> None:
        while not stopped.is_set():
            try:
                work()
            except Exception as err:  # noqa: BLE001 - whatever it is, the test must see it
                errors.append(err)
                return
            counts[name] += 1

    def record() -> None:
        list(catalog.record(run(f"run-{counts['recorded']}"), batches(gemms([1, 2, 3]))))

    works: tuple[tuple[Callable[[], object], str], ...] = (
        (record, "recorded"),
        (lambda: _rows(catalog), "read"),
    )
    threads = [threading.Thread(target=repeat, args=work) for work in works]
    for thread in threads:
        thread.start()
    for _ in range(3):
        catalog.compact()
        goal = counts["recorded"] + 3
        while counts["recorded"] < goal and not errors:
            time.sleep(0.01)
    stopped.set()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert 3 * counts["recorded"] == _rows(catalog).num_rows


@pytest.mark.slow
def test_a_process_killed_while_it_compacts_leaves_a_whole_catalog(tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    catalog = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    catalog.open()
    list(catalog.record(run(), batches(gemms(range(1, 20_001)))))
    catalog.close()
    for delay_s in (0.0, 0.05, 0.1, 0.2, 0.4):
        _kill_after(delay_s, "while True: catalog.compact()", path)
        catalog.open()
        assert 20_000 == _rows(catalog).num_rows
        catalog.close()
    assert [] == list((tmp_path / "catalog.duckdb.tmp").glob("copy_*"))
