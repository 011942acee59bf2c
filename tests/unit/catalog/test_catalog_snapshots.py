"""Snapshots: immutable, named by content, held, compared."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.reading.snapshot import create_snapshot, runs_needed_by_snapshots
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.errors import InvalidRequestError, SnapshotInUseError, UnknownDatasetError
from foretoken.domain.measurements.measurement import (
    MeasurementFilter,
    PruneRequest,
    RunKind,
    Snapshot,
    SnapshotChange,
)
from foretoken.wire.arrow import read_table

_ALL = MeasurementFilter(include_failed=True, include_flagged=True)
_NOW = datetime(2026, 5, 6, tzinfo=UTC)


def _within(snapshot: Snapshot, **fields: Any) -> MeasurementFilter:
    every = {"include_failed": True, "include_flagged": True, **fields}
    return MeasurementFilter(snapshot=snapshot.content_hash, **every)


def _sizes(catalog: CatalogService, selection: MeasurementFilter) -> list[int]:
    found = read_table(catalog.read_measurements(selection))
    return [dict(dims)["m"] for dims in found.column("dims").to_pylist()]


def _record(catalog: CatalogService, run_id: str, *tables: Any, **options: Any) -> None:
    list(catalog.record(run(run_id), batches(*tables, **options)))


def _review(catalog: CatalogService, flag: str, places: Sequence[tuple[int, int]]) -> None:
    """Flag rows, given by batch and place, and withdraw all earlier flags, as a review does."""
    with catalog._store.transaction() as cursor:
        number = next_moment(cursor)
        cursor.execute("INSERT INTO review VALUES (?, '', '', '', 0, ?)", [number, _NOW])
        cursor.execute("UPDATE doubt SET until = ? WHERE until IS NULL", [number])
        for place in places:
            cursor.execute("INSERT INTO doubt VALUES (?, ?, ?, ?, NULL)", [*place, flag, number])


def test_a_snapshot_keeps_its_rows_whatever_is_recorded_later(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1, 2]), is_complete=False)
    snapshot = catalog.create_snapshot(_ALL)
    _record(catalog, "run-2", gemms([3]))
    assert [1, 2] == _sizes(catalog, _within(snapshot))
    assert [1, 2, 3] == _sizes(catalog, _ALL)
    assert snapshot == catalog.describe_snapshot(_within(snapshot))
    assert snapshot.content_hash != catalog.describe_snapshot(_ALL).content_hash


def test_what_is_described_is_what_would_be_created(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1, 2]))
    described = catalog.describe_snapshot(_ALL)
    created = catalog.create_snapshot(_ALL)
    assert ("", described.content_hash) == (described.created_at, created.content_hash)
    assert created == catalog.describe_snapshot(_ALL)
    assert (created,) == catalog.list_snapshots()


def test_the_same_content_is_the_same_snapshot_with_one_more_holder(
    catalog: CatalogService,
) -> None:
    _record(catalog, "run-1", gemms([1, 2]))
    first = catalog.create_snapshot(_ALL, "model a")
    again = catalog.create_snapshot(MeasurementFilter(operator="gemm"), "model b")
    third = catalog.create_snapshot(_within(first), "model a")
    assert ("model a",) == first.holders
    assert ("model a", "model b") == again.holders
    assert again == third
    assert (first.content_hash, first.created_at) == (again.content_hash, again.created_at)
    assert 1 == len(catalog.list_snapshots())


def test_an_import_under_way_is_in_no_snapshot_even_when_it_is_complete(
    catalog: CatalogService,
) -> None:
    _record(catalog, "run-1", gemms([1]))
    first, second = batches(gemms([2]), gemms([3]))
    importing = run("run-2", RunKind.IMPORT)
    list(catalog.record(importing, [first]))
    snapshot = catalog.create_snapshot(_ALL)
    list(catalog.record(importing, [second]))
    assert [1] == _sizes(catalog, _within(snapshot))
    assert [1, 2, 3] == _sizes(catalog, _ALL)


def test_a_snapshot_keeps_the_doubts_of_its_moment(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(row(1), row(2, flags=["mine: own"]), row(3)))
    before = catalog.create_snapshot(_ALL)
    trusted = catalog.create_snapshot(MeasurementFilter())
    _review(catalog, "late: odd", [(1, 1), (1, 2)])
    doubted = catalog.create_snapshot(_ALL)
    _review(catalog, "", [])

    def flags(selection: MeasurementFilter) -> list[list[str] | None]:
        return list(read_table(catalog.read_measurements(selection)).column("flags").to_pylist())

    assert [None, ["mine: own"], None] == flags(_within(before))
    assert [None, ["mine: own", "late: odd"], ["late: odd"]] == flags(_within(doubted))
    assert [None, ["mine: own"], None] == flags(_ALL)
    assert [1, 3] == _sizes(catalog, _within(trusted))
    assert [1] == _sizes(catalog, _within(doubted, include_flagged=False))
    assert before == catalog.create_snapshot(_ALL)
    assert 3 == len({s.content_hash for s in catalog.list_snapshots()})


def test_a_snapshot_is_narrowed_by_the_rest_of_the_filter(catalog: CatalogService) -> None:
    rows = table(row(1), row(2, device="a40"), row(3, framework_version="0.20.1", model="m"))
    _record(catalog, "run-1", rows)
    snapshot = catalog.create_snapshot(MeasurementFilter(framework="vllm"))
    _record(catalog, "run-2", gemms([4], device="a40"))
    assert [2] == _sizes(catalog, _within(snapshot, device="a40"))
    assert [3] == _sizes(catalog, _within(snapshot, framework="vllm 0.20"))
    assert [3] == _sizes(catalog, _within(snapshot, model="m"))
    narrowed = catalog.create_snapshot(_within(snapshot, device="a40"))
    assert [2] == _sizes(catalog, _within(narrowed))


@pytest.mark.parametrize(
    ("held", "wanted"),
    [({"device": "a30"}, {"device": "a40"}), ({"framework": "vllm"}, {"framework": "vllmx"})],
)
def test_what_a_snapshot_cannot_hold_is_no_silent_nothing(
    held: dict[str, str], wanted: dict[str, str], catalog: CatalogService
) -> None:
    _record(catalog, "run-1", gemms([1]))
    snapshot = catalog.create_snapshot(MeasurementFilter(**held))
    with pytest.raises(InvalidRequestError, match="the snapshot holds rows of"):
        catalog.read_measurements(_within(snapshot, **wanted))


def test_a_snapshot_is_found_by_the_beginning_of_its_hash(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1]))
    snapshot = catalog.create_snapshot(_ALL)
    found = read_table(
        catalog.read_measurements(MeasurementFilter(snapshot=snapshot.content_hash[:6]))
    )
    assert 1 == found.num_rows
    with pytest.raises(InvalidRequestError, match="at least 6 characters"):
        catalog.describe_snapshot(MeasurementFilter(snapshot=snapshot.content_hash[:5]))
    with pytest.raises(UnknownDatasetError, match=f"did you mean {snapshot.content_hash[:12]}"):
        catalog.describe_snapshot(MeasurementFilter(snapshot=snapshot.content_hash[:8] + "zz"))


def test_a_beginning_that_two_share_names_neither(catalog: CatalogService) -> None:
    with catalog._store.transaction() as cursor:
        for name in ("abcdef01", "abcdef02"):
            cursor.execute(
                "INSERT INTO snapshot VALUES (?, 0, 0, '', '', '', '', '', '', true, true, ?)",
                [name, _NOW],
            )
    with pytest.raises(InvalidRequestError, match="may be abcdef01, abcdef02"):
        catalog.release_snapshot("abcdef0", "x")
    assert "abcdef01" == catalog.release_snapshot("abcdef01", "x").content_hash


def test_a_held_snapshot_cannot_be_deleted_before_it_is_released(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1]))
    name = catalog.create_snapshot(_ALL, "model a").content_hash
    with pytest.raises(SnapshotInUseError, match="held by model a"):
        catalog.delete_snapshot(name)
    assert ("model a",) == catalog.release_snapshot(name, "somebody else").holders
    assert () == catalog.release_snapshot(name[:8], "model a").holders
    catalog.delete_snapshot(name)
    assert () == catalog.list_snapshots()
    with pytest.raises(UnknownDatasetError):
        catalog.delete_snapshot(name)


def test_a_deleted_snapshot_can_be_made_again_while_an_older_reader_runs(
    catalog: CatalogService,
) -> None:
    _record(catalog, "run-1", gemms([1]))
    snapshot = catalog.create_snapshot(_ALL)
    with catalog._store.cursor() as reading:
        reading.begin()
        assert 1 == len(reading.execute("FROM snapshot").fetchall())
        catalog.delete_snapshot(snapshot.content_hash)
        assert snapshot.content_hash == catalog.create_snapshot(_ALL).content_hash


def test_the_newest_snapshot_comes_first(catalog: CatalogService) -> None:
    names = []
    for number in (1, 2, 3):
        _record(catalog, f"run-{number}", gemms([number]))
        names.append(catalog.create_snapshot(_ALL).content_hash)
    assert names[::-1] == [snapshot.content_hash for snapshot in catalog.list_snapshots()]


def test_a_difference_is_counted_by_what_was_measured_where(catalog: CatalogService) -> None:
    _record(catalog, "run-1", table(row(1), row(2), row(2)), is_complete=False)
    before = catalog.create_snapshot(_ALL)
    message = {"message_bytes": 4096, "devices_per_node": 4, "num_nodes": 1}
    collective = row(device="a100_sxm_80", topology="a100_dgx", dims=message)
    collective |= {"operator": "all_reduce", "latency_us_median": 50.0}
    _record(catalog, "run-2", table(row(2), collective))
    after = catalog.create_snapshot(_ALL)
    place = {"operator": "all_reduce", "device": "a100_sxm_80", "topology": "a100_dgx"}
    added = (
        SnapshotChange(**place, num_added=1, num_removed=0),
        SnapshotChange(operator="gemm", device="a30", topology="", num_added=1, num_removed=0),
    )
    found = catalog.diff_snapshots(before.content_hash[:8], after.content_hash)
    assert (before, after, added) == (found.before, found.after, found.changes)
    assert () == catalog.diff_snapshots(after.content_hash, after.content_hash).changes


def test_rows_of_other_filters_cancel_out_in_a_difference(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1, 2]), gemms([3], device="a40"))
    before = catalog.create_snapshot(MeasurementFilter(device="a30"))
    after = catalog.create_snapshot(_ALL)
    expected = SnapshotChange(
        operator="gemm", device="a40", topology="", num_added=1, num_removed=0
    )
    assert (expected,) == catalog.diff_snapshots(before.content_hash, after.content_hash).changes


def test_a_row_with_other_flags_is_removed_and_added(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1, 2, 3]), gemms([4]))
    before = catalog.create_snapshot(_ALL)
    _review(catalog, "late: odd", [(1, 1)])
    after = catalog.create_snapshot(_ALL)
    expected = SnapshotChange(
        operator="gemm", device="a30", topology="", num_added=1, num_removed=1
    )
    assert (expected,) == catalog.diff_snapshots(before.content_hash, after.content_hash).changes


def _needed(catalog: CatalogService) -> set[str]:
    with catalog._store.cursor() as cursor:
        return runs_needed_by_snapshots(cursor)


def test_the_runs_a_snapshot_needs_are_those_it_selects_rows_of(catalog: CatalogService) -> None:
    _record(catalog, "run-1", gemms([1]))
    _record(catalog, "run-2", gemms([2], device="a40"))
    assert set() == _needed(catalog)
    snapshot = catalog.create_snapshot(MeasurementFilter(device="a40"))
    _record(catalog, "run-3", gemms([3], device="a40"))
    assert {"run-2"} == _needed(catalog)
    catalog.delete_snapshot(snapshot.content_hash)
    assert set() == _needed(catalog)


def _delete_run(cursor: duckdb.DuckDBPyConnection, run_id: str) -> None:
    cursor.execute(
        "DELETE FROM measurement WHERE batch_number IN"
        " (SELECT batch_number FROM batch WHERE run_id = ?)",
        [run_id],
    )
    cursor.execute("DELETE FROM batch WHERE run_id = ?", [run_id])
    cursor.execute("DELETE FROM run WHERE run_id = ?", [run_id])


def test_rows_recorded_after_others_were_pruned_are_in_no_older_snapshot(
    tmp_path: Path,
) -> None:
    days = itertools.count(0, 2)  # a run is old as soon as it is recorded
    config = CatalogConfig(path=str(tmp_path / "catalog.duckdb"), num_threads=1)
    catalog = CatalogService(config, lambda: _NOW + timedelta(days=next(days)))
    catalog.open()
    _record(catalog, "run-1", gemms([1]), is_complete=False)
    _record(catalog, "run-2", gemms([2], device="a40"), is_complete=False)
    snapshot = catalog.create_snapshot(MeasurementFilter(device="a30"))
    report = catalog.prune(PruneRequest(older_than_days=0))
    _record(catalog, "run-3", gemms([3]))
    assert (("run-2",), ("run-1",)) == (report.deleted_run_ids, report.kept_run_ids)
    assert ([1], [1, 3]) == (_sizes(catalog, _within(snapshot)), _sizes(catalog, _ALL))
    catalog.close()


class _PruningStore(Store):
    """Loses a run just before it is written to for the first time."""

    def lose(self, run_id: str) -> None:
        self._run_id = run_id

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with super().transaction() as cursor:
            if run_id := getattr(self, "_run_id", ""):
                _delete_run(cursor, run_id)
                self._run_id = ""
            yield cursor


def test_rows_pruned_while_they_are_hashed_are_in_no_snapshot(
    tmp_path: Path, clock: Callable[[], datetime]
) -> None:
    config = CatalogConfig(path=str(tmp_path / "catalog.duckdb"), num_threads=1)
    catalog = CatalogService(config, clock)
    catalog.open()
    _record(catalog, "run-1", gemms([1]))
    _record(catalog, "run-2", gemms([2]))
    catalog.close()
    store = _PruningStore(config)
    store.open()
    store.lose("run-1")
    snapshot = create_snapshot(store, _ALL, "", _NOW)
    store.close()
    assert 1 == snapshot.num_rows
