"""What people and operators do with a catalog goes alike whether it is embedded or remote."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_reach import Reach
from contract_rows import make_batches, make_rows, make_run

from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.upkeep.backup import restore_backup
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import (
    InvalidRequestError,
    QueryLimitError,
    SnapshotInUseError,
    UnknownDatasetError,
    UnknownJobError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.measurement import (
    CheckRequest,
    MeasurementBatch,
    MeasurementFilter,
    PruneRequest,
    RunKind,
    SqlQuery,
)
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire.arrow import read_table

_ALL = MeasurementFilter()


@pytest.fixture
def port(catalog_path: str, reach: Reach) -> Iterator[CatalogAdminPort]:
    config = CatalogConfig(path=catalog_path, num_threads=1, sql_max_rows=10_000)
    service = CatalogService(config)
    service.open()
    yield reach(service, servicer.register, CatalogClient.connect)
    service.close()


@pytest.fixture(scope="module")
def recorded(shared_catalog: CatalogService, shared_reach: Reach) -> CatalogAdminPort:
    """A catalog with a run, which no question changes."""
    port: CatalogAdminPort = shared_reach(shared_catalog, servicer.register, CatalogClient.connect)
    _record(port, "first")
    return port


def _record(port: CatalogAdminPort, run_id: str, num_batches: int = 1) -> None:
    list(port.record(make_run(run_id), make_batches(num_batches)))


def _ask(port: CatalogAdminPort, text: str, max_num_rows: int = 0) -> list[dict[str, object]]:
    found = read_table(port.query_sql(SqlQuery(text=text, max_num_rows=max_num_rows)))
    return list(found.to_pylist())


def test_a_snapshot_keeps_its_rows(port: CatalogAdminPort) -> None:
    _record(port, "first")
    snapshot = port.create_snapshot(MeasurementFilter(device="a30"), "somebody")
    _record(port, "second")
    kept = MeasurementFilter(snapshot=snapshot.content_hash[:10])
    rows = read_table(port.read_measurements(kept))
    assert (4, {"first"}) == (rows.num_rows, set(rows.column("run_id").to_pylist()))
    assert snapshot.content_hash == port.describe_snapshot(kept).content_hash
    assert (snapshot,) == port.list_snapshots()
    assert (MeasurementFilter(device="a30"), ("somebody",)) == (
        snapshot.selection,
        snapshot.holders,
    )


def test_the_same_content_is_the_same_snapshot(port: CatalogAdminPort) -> None:
    _record(port, "first")
    port.create_snapshot(_ALL, "one")
    snapshot = port.create_snapshot(_ALL, "two")
    assert ("one", "two") == snapshot.holders
    again = port.create_snapshot(MeasurementFilter(snapshot=snapshot.content_hash), "three")
    assert (snapshot.content_hash, ("one", "two", "three")) == (again.content_hash, again.holders)
    assert (again,) == port.list_snapshots()


def test_a_held_snapshot_is_not_deleted(port: CatalogAdminPort) -> None:
    _record(port, "first")
    snapshot = port.create_snapshot(_ALL, "somebody")
    with pytest.raises(SnapshotInUseError, match="somebody"):
        port.delete_snapshot(snapshot.content_hash)
    assert () == port.release_snapshot(snapshot.content_hash, "somebody").holders
    port.delete_snapshot(snapshot.content_hash)
    assert () == port.list_snapshots()


def test_snapshots_are_compared(port: CatalogAdminPort) -> None:
    _record(port, "first")
    before = port.create_snapshot(_ALL)
    _record(port, "second", num_batches=2)
    after = port.create_snapshot(_ALL)
    diff = port.diff_snapshots(before.content_hash, after.content_hash)
    assert (before, after) == (diff.before, diff.after)
    assert [("gemm", "a30", 8, 0)] == [
        (change.operator, change.device, change.num_added, change.num_removed)
        for change in diff.changes
    ]


def test_an_unknown_snapshot_is_said(port: CatalogAdminPort) -> None:
    unknown = MeasurementFilter(snapshot="0123456789")
    with pytest.raises(UnknownDatasetError, match="0123456789"):
        port.read_measurements(unknown)
    with pytest.raises(UnknownDatasetError, match="0123456789"):
        port.delete_snapshot("0123456789")


def test_devices_and_models_are_listed(port: CatalogAdminPort) -> None:
    rows = make_rows([1, 2], model="llama-3.1-8b")
    list(port.record(make_run(), [MeasurementBatch(batch_index=0, rows=rows, is_last=True)]))
    (device,), (model,) = port.list_devices(), port.list_models()
    assert ("a30", 2, 1, 1) == (
        device.name,
        device.num_rows,
        device.num_operators,
        device.num_runs,
    )
    assert ("llama-3.1-8b", 2) == (model.name, model.num_rows)


def test_sql_answers(recorded: CatalogAdminPort) -> None:
    first = "SELECT m, device FROM op_gemm WHERE m = 1"
    assert [{"m": 1, "device": "a30"}] == _ask(recorded, first)
    counted = _ask(recorded, "SELECT range AS x FROM range(10)", max_num_rows=2)
    assert [{"x": 0}, {"x": 1}] == counted


@pytest.mark.parametrize(
    "text",
    [
        "DELETE FROM batch",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_csv('/etc/passwd')",
        "ATTACH 'other.duckdb'",
        "SELEC 1",
        "",
    ],
    ids=["write", "two", "file", "attach", "syntax", "nothing"],
)
def test_sql_that_is_no_question_is_refused(text: str, recorded: CatalogAdminPort) -> None:
    with pytest.raises(InvalidRequestError):
        _ask(recorded, text)
    assert 4 == read_table(recorded.read_measurements(_ALL)).num_rows


@pytest.mark.slow
def test_sql_that_runs_away_is_ended(port: CatalogAdminPort) -> None:
    with pytest.raises(QueryLimitError):
        _ask(port, "SELECT * FROM range(20000)")
    endless = "SELECT count(*) FROM range(100000000) a, range(100000000) b"
    with pytest.raises(QueryLimitError):
        read_table(port.query_sql(SqlQuery(text=endless, timeout_s=0.2)))


def test_a_check_reports_and_flags(port: CatalogAdminPort) -> None:
    """A point measured apart in another run is found only when runs are judged together."""
    for name, factor in (("one", 1.0), ("two", 1.0), ("three", 3.0)):
        rows = make_rows([64, 128, 256], latency_us_median=100.0 * factor)
        batch = MeasurementBatch(batch_index=0, rows=rows)
        list(port.record(make_run(name, kind=RunKind.PROFILE), [batch]))
    assert 9 == read_table(port.read_measurements(_ALL)).num_rows
    job = port.create_check(CheckRequest(device="a30"))
    *_, last = port.watch_job(job.job_id)
    assert JobState.SUCCEEDED is last.state, last.error_message
    report = port.get_check_report(job.job_id)
    assert (9, 3, 3) == (report.num_rows, report.num_flagged, report.num_new)
    assert {"duplicate_disagrees"} == {finding.test for finding in report.findings}
    assert 6 == read_table(port.read_measurements(_ALL)).num_rows


def test_an_unknown_check_is_said(port: CatalogAdminPort) -> None:
    with pytest.raises(UnknownJobError):
        port.get_check_report("never-was")


def test_a_backup_is_a_catalog(port: CatalogAdminPort, tmp_path: Path) -> None:
    _record(port, "first", num_batches=3)
    backup = tmp_path / "backup.duckdb"
    backup.write_bytes(b"".join(port.backup()))
    _record(port, "second")
    target = tmp_path / "elsewhere" / "catalog.duckdb"
    restore_backup(backup, target)
    service = CatalogService(CatalogConfig(path=str(target), num_threads=1))
    service.open()
    rows = read_table(service.read_measurements(_ALL))
    service.close()
    assert (12, {"first"}) == (rows.num_rows, set(rows.column("run_id").to_pylist()))


@pytest.mark.slow
def test_pruning_spares_what_a_snapshot_needs(port: CatalogAdminPort) -> None:
    _record(port, "needed")
    port.create_snapshot(_ALL)
    _record(port, "old")
    request = PruneRequest(older_than_days=0.0, is_dry_run=True)
    planned = port.prune(request)
    assert (("old",), 4, ("needed",), 4) == (
        planned.deleted_run_ids,
        planned.num_deleted_rows,
        planned.kept_run_ids,
        planned.num_kept_rows,
    )
    assert 8 == read_table(port.read_measurements(_ALL)).num_rows
    assert planned == port.prune(PruneRequest(older_than_days=0.0))
    rows = read_table(port.read_measurements(_ALL))
    assert ["needed"] * 4 == rows.column("run_id").to_pylist()
    assert port.compact().bytes_after > 0
    assert rows == read_table(port.read_measurements(_ALL))
