"""A backup is the whole catalog of one moment, and becomes a catalog again or is refused."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.upkeep.backup import restore_backup
from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    InvalidRequestError,
)
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    MeasurementBatch,
    MeasurementFilter,
    SqlQuery,
)
from foretoken.wire.arrow import read_table

_EVERYTHING = MeasurementFilter(include_failed=True, include_flagged=True)
_PRELUDE = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from catalog_rows import batches, gemms, run
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
catalog = CatalogService(CatalogConfig(path=sys.argv[1], num_threads=1))
catalog.open()
"""
_BACK_UP_FOREVER = """
list(catalog.record(run(), batches(gemms(range(1, 50_001)))))
print("recorded", flush=True)
while True:
    list(catalog.backup())
"""
_BACK_UP_ON_A_FULL_DISK = """
import resource
from foretoken.domain.errors import StorageFullError
list(catalog.record(run(), batches(gemms(range(1, 20_001)))))
no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, no_limit[1]))
try:
    list(catalog.backup())
except StorageFullError as err:
    print(err.reason)
resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
print(len(list(catalog.record(run("after"), batches(gemms([1]))))))
print(sum(len(piece) for piece in catalog.backup()) > 100_000)
print(sorted(path.name for path in Path(sys.argv[1] + ".tmp").glob("*")))
catalog.close()
"""


def _start(script: str, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _PRELUDE + script, str(path), str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _write_backup(catalog: CatalogService, path: Path) -> Path:
    path.write_bytes(b"".join(catalog.backup()))
    return path


def _rows_of(path: Path) -> pa.Table:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    try:
        return read_table(service.read_measurements(_EVERYTHING))
    finally:
        service.close()


@pytest.fixture
def backup(catalog: CatalogService, tmp_path: Path) -> Path:
    """A backup of a catalog of three rows, and that catalog closed."""
    list(catalog.record(run(), batches(gemms([1, 2, 3]))))
    path = _write_backup(catalog, tmp_path / "backup.duckdb")
    catalog.close()
    return path


def test_a_restored_catalog_has_what_the_first_one_had(
    catalog: CatalogService, tmp_path: Path
) -> None:
    list(catalog.record(run("a"), batches(gemms([3, 1, 2]), gemms([5]))))
    list(catalog.record(run("b"), batches(gemms([7]), is_complete=False)))
    snapshot = catalog.create_snapshot(MeasurementFilter(), "model 1")
    backup = _write_backup(catalog, tmp_path / "backup.duckdb")
    assert restore_backup(backup, tmp_path / "else" / "catalog.duckdb") is None
    restored = CatalogService(CatalogConfig(path=str(tmp_path / "else" / "catalog.duckdb")))
    restored.open()
    rows = read_table(restored.read_measurements(_EVERYTHING))
    assert read_table(catalog.read_measurements(_EVERYTHING)).equals(rows)
    assert catalog.list_runs() == restored.list_runs()
    assert (snapshot,) == restored.list_snapshots()
    kept = restored.read_measurements(MeasurementFilter(snapshot=snapshot.content_hash))
    assert snapshot.num_rows == read_table(kept).num_rows
    restored.close()


@pytest.mark.slow
def test_what_was_acknowledged_before_is_in_it_and_every_batch_is_whole(
    catalog: CatalogService, tmp_path: Path
) -> None:
    """Three senders record while it is made."""
    stopped = threading.Event()
    acknowledged: list[BatchReceipt] = []

    def send(name: str) -> None:
        index = 0
        while not stopped.is_set():
            batch = MeasurementBatch(batch_index=index, rows=gemms(range(1, 201)))
            acknowledged.extend(catalog.record(run(name), [batch]))
            index += 1

    senders = [threading.Thread(target=send, args=(f"run-{n}",)) for n in range(3)]
    for sender in senders:
        sender.start()
    found: list[tuple[int, Path]] = []
    for number in range(3):
        goal = len(acknowledged) + 10
        while len(acknowledged) < goal:
            time.sleep(0.01)
        known = len(acknowledged)
        found.append((known, _write_backup(catalog, tmp_path / f"{number}.backup")))
    stopped.set()
    for sender in senders:
        sender.join()
    for known, backup in found:
        target = backup.with_suffix(".duckdb")
        restore_backup(backup, target)  # it refuses batches that are not whole
        restored = CatalogService(CatalogConfig(path=str(target)))
        restored.open()
        again = MeasurementBatch(batch_index=0, rows=gemms(range(1, 201)))
        for receipt in acknowledged[:known]:
            one = MeasurementBatch(batch_index=receipt.batch_index, rows=again.rows)
            (present,) = restored.record(run(receipt.run_id), [one])
            assert (True, 200) == (present.was_duplicate, present.num_rows)
        restored.close()


@pytest.mark.slow
def test_it_is_sent_in_pieces_and_leaves_nothing_behind(
    catalog: CatalogService, tmp_path: Path
) -> None:
    list(catalog.record(run(), batches(gemms(range(1, 60_001), power_w=1.0))))
    scratch = tmp_path / "catalog.duckdb.tmp"
    sizes = [len(piece) for piece in catalog.backup()]
    assert {2 * 2**20} == set(sizes[:-1])
    assert [] == list(scratch.glob("*"))
    pieces = catalog.backup()
    next(pieces)
    assert [] == list(scratch.glob("*"))
    del pieces


@pytest.mark.slow
def test_a_process_killed_while_it_makes_one_leaves_the_catalog_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    for delay_s in (0.0, 0.1, 0.3):
        with _start(_BACK_UP_FOREVER, path) as process:
            assert process.stdout is not None
            assert "recorded\n" == process.stdout.readline()
            time.sleep(delay_s)
            process.kill()
        assert 50_000 == _rows_of(path).num_rows
        assert [] == list((tmp_path / "catalog.duckdb.tmp").glob("copy_*"))


@pytest.mark.slow
def test_no_room_for_a_copy_is_said_and_recording_goes_on(tmp_path: Path) -> None:
    with _start(_BACK_UP_ON_A_FULL_DISK, tmp_path / "catalog.duckdb") as process:
        said, _ = process.communicate()
    assert ["STORAGE_FULL", "1", "True", "[]"] == said.split("\n")[:4]


@pytest.mark.slow
def test_an_existing_catalog_is_replaced_only_if_told_to_and_kept(
    backup: Path, tmp_path: Path
) -> None:
    target = tmp_path / "catalog.duckdb"
    catalog = CatalogService(CatalogConfig(path=str(target)))
    catalog.open()
    list(catalog.record(run("later"), batches(gemms([9]))))
    catalog.close()
    with pytest.raises(InvalidRequestError, match="exists; replace it"):
        restore_backup(backup, target)
    assert 4 == _rows_of(target).num_rows
    kept = restore_backup(backup, target, is_replacing=True)
    assert tmp_path / "catalog.duckdb.old" == kept
    assert (3, 4) == (_rows_of(target).num_rows, _rows_of(kept).num_rows)
    with pytest.raises(InvalidRequestError, match="is in the way"):
        restore_backup(backup, target, is_replacing=True)


def test_a_damaged_catalog_can_be_replaced(backup: Path, tmp_path: Path) -> None:
    target = tmp_path / "damaged.duckdb"
    target.write_bytes(b"damaged" * 10_000)
    kept = restore_backup(backup, target, is_replacing=True)
    assert kept is not None
    assert b"damaged" * 10_000 == kept.read_bytes()
    assert 3 == _rows_of(target).num_rows


def test_the_log_of_the_replaced_catalog_goes_with_it(backup: Path, tmp_path: Path) -> None:
    """Merged into the restored catalog it would spoil that."""
    target = tmp_path / "damaged.duckdb"
    log = tmp_path / "damaged.duckdb.wal"
    target.write_bytes(b"damaged" * 10_000)
    log.write_bytes(b"log")
    restore_backup(backup, target, is_replacing=True)
    assert b"log" == (tmp_path / "damaged.duckdb.old.wal").read_bytes()
    assert 3 == _rows_of(target).num_rows


def test_a_catalog_in_use_is_not_replaced(backup: Path, tmp_path: Path) -> None:
    target = tmp_path / "catalog.duckdb"
    catalog = CatalogService(CatalogConfig(path=str(target)))
    catalog.open()
    with pytest.raises(CatalogBusyError):
        restore_backup(backup, target, is_replacing=True)
    list(catalog.record(run("later"), batches(gemms([9]))))
    catalog.close()
    assert 4 == _rows_of(target).num_rows


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300_000])


def _change_some_blocks(path: Path) -> None:
    content = bytearray(path.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter : 100] = bytes(len(content[quarter : 3 * quarter : 100]))
    path.write_bytes(content)


def _tear_a_batch(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("DELETE FROM measurement WHERE row_index = 1")


def _come_from_the_future(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("INSERT INTO schema_version VALUES (9000, 'later')")


def _be_empty(path: Path) -> None:
    path.unlink()
    duckdb.connect(str(path)).close()


def _be_another_database(path: Path) -> None:
    path.unlink()
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE somebody_elses (x INTEGER)")


def _be_no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        _truncate,
        _change_some_blocks,
        _tear_a_batch,
        _come_from_the_future,
        _be_empty,
        _be_another_database,
        _be_no_database,
    ],
)
def test_what_is_not_a_whole_backup_is_refused_and_nothing_is_made(
    spoil: Callable[[Path], None], backup: Path, tmp_path: Path
) -> None:
    spoil(backup)
    target = tmp_path / "else" / "catalog.duckdb"
    with pytest.raises(CorruptCatalogError, match="cannot be restored"):
        restore_backup(backup, target)
    assert [] == list(target.parent.glob("*"))


def test_a_backup_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        restore_backup(tmp_path / "none", tmp_path / "catalog.duckdb")


def test_a_file_with_a_log_is_no_backup(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "backup.duckdb.wal").write_bytes(b"x")
    with pytest.raises(InvalidRequestError, match="no backup"):
        restore_backup(backup, tmp_path / "else.duckdb")


@pytest.mark.slow
def test_the_views_of_a_restored_catalog_can_be_asked(backup: Path, tmp_path: Path) -> None:
    target = tmp_path / "else.duckdb"
    restore_backup(backup, target)
    service = CatalogService(CatalogConfig(path=str(target)))
    service.open()
    answer = read_table(service.query_sql(SqlQuery(text="SELECT max(m) FROM op_gemm")))
    assert 3 == answer.column(0)[0].as_py()
    service.close()
