"""Several processes share a lake: nothing is doubled, nothing lost, and what fails is said."""

import contextlib
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run
from lake_servers import Postgres, find_missing, serve_postgres, serve_s3

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.lake import LakeAttachment
from foretoken.catalog.upkeep.backup import restore_backup
from foretoken.domain.errors import CatalogBusyError, CorruptCatalogError, InvalidRequestError
from foretoken.domain.measurements.measurement import Artifact, MeasurementFilter
from foretoken.wire.arrow import read_table

if missing := find_missing():
    pytest.skip(missing, allow_module_level=True)

Open = Callable[[LakeConfig], CatalogService]
Start = Callable[..., subprocess.Popen[str]]

_NUMBERS = itertools.count()
_NUM_ROUNDS = 2
_BATCH_ROWS = 150
_INGEST = """
import itertools, sys
from catalog_rows import gemms, run
from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementBatch

folder, postgres, schema_name, run_id, num_rows, num_batches = sys.argv[1:]
lake = LakeConfig(data_path=folder, postgres=postgres, schema_name=schema_name)
service = CatalogService(CatalogConfig(path=folder + "/unused", num_threads=1, lake=lake))
service.open()
rows = gemms(range(1, int(num_rows) + 1))
indices = range(int(num_batches)) if int(num_batches) else itertools.count()
sent = (MeasurementBatch(batch_index=i, rows=rows) for i in indices)
print("open", flush=True)
for receipt in service.record(run(run_id), sent):
    if not receipt.was_duplicate:
        print(receipt.batch_index, flush=True)
service.close()
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with serve_postgres() as server:
        yield server


@pytest.fixture
def lake(postgres: Postgres, tmp_path: Path) -> LakeConfig:
    return postgres.lake(str(tmp_path / "rows"), f"lake_{next(_NUMBERS)}")


@pytest.fixture
def open_catalog(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def open_catalog(lake: LakeConfig) -> CatalogService:
            path = str(tmp_path / "unused.duckdb")
            service = CatalogService(CatalogConfig(path=path, num_threads=1, lake=lake))
            service.open()
            stack.callback(service.close)
            return service

        yield open_catalog


@pytest.fixture
def start_writer() -> Iterator[Start]:
    """Start a process that records a run in a lake, and wait until it has it open."""
    writers: list[subprocess.Popen[str]] = []

    def start_writer(lake: LakeConfig, run_id: str, num_batches: int = 0) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        place = [lake.data_path, lake.postgres, lake.schema_name]
        arguments = [*place, run_id, str(_BATCH_ROWS), str(num_batches)]
        writer = subprocess.Popen(
            [sys.executable, "-c", _INGEST, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        writers.append(writer)
        assert writer.stdout is not None
        assert "open\n" == writer.stdout.readline()
        return writer

    yield start_writer
    for writer in writers:
        writer.kill()
        writer.communicate()


def _record(service: CatalogService, run_id: str) -> None:
    list(service.record(run(run_id), batches(gemms(range(1, _BATCH_ROWS + 1)))))


def _count(service: CatalogService) -> int:
    return read_table(service.read_measurements(MeasurementFilter(include_flagged=True))).num_rows


def _finish(process: subprocess.Popen[str]) -> set[int]:
    """Return the batches it had receipts of."""
    output, _ = process.communicate(timeout=120)
    return {int(line) for line in output.split()}


def _stored(service: CatalogService) -> list[tuple[str, int, int, int]]:
    """Return run, index, number and rows of every batch, as the tables have them."""
    with service._store.cursor() as cursor:
        return cursor.execute(
            "SELECT run_id, batch_index, batch_number, count(row_index)"
            " FROM batch LEFT JOIN measurement USING (batch_number) GROUP BY ALL ORDER BY ALL"
        ).fetchall()


def test_two_processes_that_record_the_same_run_store_it_once(
    lake: LakeConfig, open_catalog: Open, start_writer: Start
) -> None:
    catalog = open_catalog(lake)
    writers = [start_writer(lake, "same", num_batches=15) for _ in range(2)]
    first, second = [_finish(writer) for writer in writers]
    assert set() == first & second
    stored = _stored(catalog)
    assert [("same", index, _BATCH_ROWS) for index in range(15)] == [
        (run_id, index, num_rows) for run_id, index, _, num_rows in stored
    ]
    assert list(range(1, 16)) == sorted(number for _, _, number, _ in stored)


def test_a_killed_process_takes_nothing_with_it(
    lake: LakeConfig, open_catalog: Open, start_writer: Start
) -> None:
    """Of every kill: receipts are true, batches whole, and the other process goes on."""
    catalog = open_catalog(lake)
    receipts: dict[str, set[int]] = {}
    pause = random.Random(0)  # noqa: S311 - moments, not secrets
    for number in range(_NUM_ROUNDS):
        writers = {
            f"{name}-{number}": start_writer(lake, f"{name}-{number}") for name in ("a", "b")
        }
        time.sleep(0.2 + pause.random())
        for writer in writers.values():
            writer.send_signal(signal.SIGKILL)
            time.sleep(0.3)
        receipts |= {run_id: _finish(writer) for run_id, writer in writers.items()}
    stored = _stored(catalog)
    assert {_BATCH_ROWS} == {num_rows for *_, num_rows in stored}
    assert len(stored) == len({(run_id, index) for run_id, index, *_ in stored})
    assert list(range(1, len(stored) + 1)) == sorted(number for _, _, number, _ in stored)
    for run_id, acknowledged in receipts.items():
        kept = {index for found, index, *_ in stored if found == run_id}
        assert acknowledged <= kept
        assert kept == set(range(len(kept)))


def test_a_writer_that_lost_its_lock_cannot_commit(
    lake: LakeConfig, postgres: Postgres, open_catalog: Open
) -> None:
    """Otherwise both would store a batch of the same number."""
    late, quick = open_catalog(lake), open_catalog(lake)
    lose = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"

    def write_late() -> None:
        with late._store.transaction() as cursor:
            cursor.execute("INSERT INTO review VALUES (1, '', '', '', 0, TIMESTAMP '2026-01-01')")
            postgres.execute(lose)
            _record(quick, "quick")

    with pytest.raises(CatalogBusyError, match="other processes"):
        write_late()
    _record(late, "late")
    # The number between them is that of the review of the quick one's run.
    assert [("late", 0, 3, _BATCH_ROWS), ("quick", 0, 1, _BATCH_ROWS)] == _stored(quick)


@pytest.mark.parametrize("num_bytes", [1_000_000, 5_000_000], ids=["in PostgreSQL", "in a file"])
def test_a_file_of_a_service_is_shared_compacted_and_backed_up(
    num_bytes: int, lake: LakeConfig, open_catalog: Open, tmp_path: Path
) -> None:
    one, other = open_catalog(lake), open_catalog(lake)
    content = random.Random(0).randbytes(num_bytes)  # noqa: S311 - any content
    artifact = Artifact(
        kind="latency_models",
        name="v1",
        content_hash=hashlib.sha256(content).hexdigest(),
        num_bytes=num_bytes,
        created_at="2026-01-01T00:00:00Z",
    )
    one.store_artifact(replace(artifact, name="v0"), [content])
    one.store_artifact(artifact, [content])
    active = other.activate_artifact("latency_models", "v1")
    other.delete_artifact("latency_models", "v0")
    one.compact()
    (tmp_path / "backup").write_bytes(b"".join(one.backup()))
    restore_backup(tmp_path / "backup", tmp_path / "restored.duckdb")
    restored = CatalogService(CatalogConfig(path=str(tmp_path / "restored.duckdb"), num_threads=1))
    with contextlib.closing(restored):
        restored.open()
        for catalog in (one, other, restored):
            assert (active,) == catalog.list_artifacts("latency_models")
            assert content == b"".join(catalog.read_artifact("latency_models", "v1"))


def test_a_snapshot_stays_while_others_write(lake: LakeConfig, open_catalog: Open) -> None:
    one, other = open_catalog(lake), open_catalog(lake)
    _record(one, "first")
    snapshot = one.create_snapshot(MeasurementFilter(include_flagged=True))
    _record(other, "second")
    kept = MeasurementFilter(snapshot=snapshot.content_hash)
    assert _BATCH_ROWS == read_table(other.read_measurements(kept)).num_rows
    assert 2 * _BATCH_ROWS == _count(one)


def test_without_postgres_the_catalog_is_busy_and_recovers(
    lake: LakeConfig, postgres: Postgres, open_catalog: Open
) -> None:
    catalog = open_catalog(lake)
    _record(catalog, "before")
    postgres.stop()
    with pytest.raises(CatalogBusyError, match="PostgreSQL"):
        _record(catalog, "after")
    with pytest.raises(CatalogBusyError, match="PostgreSQL"):
        open_catalog(lake)
    postgres.start()
    _record(catalog, "after")
    assert 2 * _BATCH_ROWS == _count(catalog)


def test_a_database_that_is_not_there_is_said(postgres: Postgres, open_catalog: Open) -> None:
    other = postgres.connection_string.replace("dbname=postgres", "dbname=other")
    with pytest.raises(InvalidRequestError, match=r"lake\.postgres"):
        open_catalog(LakeConfig(data_path="unused", postgres=other))


def test_rows_elsewhere_are_not_taken_for_this_lake(
    lake: LakeConfig, postgres: Postgres, tmp_path: Path, open_catalog: Open
) -> None:
    open_catalog(lake)
    elsewhere = postgres.lake(str(tmp_path / "elsewhere"), lake.schema_name)
    with pytest.raises(InvalidRequestError, match=r"lake\.data_path"):
        open_catalog(elsewhere)


def test_a_lost_file_is_said(lake: LakeConfig, open_catalog: Open) -> None:
    catalog = open_catalog(lake)
    _record(catalog, "first")
    for file in Path(lake.data_path).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(CorruptCatalogError, match="restore"):
        _count(catalog)


def test_opening_a_lake_again_changes_nothing(lake: LakeConfig, open_catalog: Open) -> None:
    catalog = open_catalog(lake)
    with catalog._store.cursor() as cursor:
        before = cursor.execute("FROM ducklake_current_snapshot('store')").fetchall()
        open_catalog(lake)
        assert before == cursor.execute("FROM ducklake_current_snapshot('store')").fetchall()


def test_compaction_merges_files_and_keeps_rows(lake: LakeConfig, open_catalog: Open) -> None:
    catalog = open_catalog(lake)
    for number in range(4):
        _record(catalog, f"run-{number}")
    rows = read_table(catalog.read_measurements(MeasurementFilter(include_flagged=True)))
    attachment = catalog._store._attachment
    assert isinstance(attachment, LakeAttachment)
    with catalog._store.cursor() as cursor, ThreadPoolExecutor(1) as pool:
        recording = pool.submit(_record, catalog, "meanwhile")
        attachment.compact(cursor)
        recording.result()
        attachment.compact(cursor)
        files = "SELECT file_count FROM ducklake_table_info('store') WHERE table_name = ?"
        assert (1,) == cursor.execute(files, ["measurement"]).fetchone()
    assert 0 < attachment.size_bytes()
    after = read_table(catalog.read_measurements(MeasurementFilter(include_flagged=True)))
    assert rows == after.slice(0, rows.num_rows)
    assert 5 * _BATCH_ROWS == after.num_rows


def test_rows_lie_in_a_bucket(
    postgres: Postgres, open_catalog: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unspoken")
    with serve_s3() as (address, bucket):
        with pytest.raises(InvalidRequestError, match="bucket"):
            _record(open_catalog(postgres.lake("s3://nowhere/rows", "nowhere", address)), "run-1")
        lake = postgres.lake(f"{bucket}/rows", "bucket", address)
        catalog = open_catalog(lake)
        _record(catalog, "run-1")
        assert _BATCH_ROWS == _count(open_catalog(lake))
        with catalog._store.cursor() as cursor:
            settings = cursor.execute("SELECT value FROM duckdb_settings()").fetchall()
            secrets = cursor.execute("SELECT secret_string FROM duckdb_secrets()").fetchall()
            listed = "SELECT count(*) FROM glob(?)"
            assert (1,) == cursor.execute(listed, [f"{bucket}/rows/**/*.parquet"]).fetchone()
    assert "unspoken" not in str(settings) + str(secrets)
    with pytest.raises(CatalogBusyError, match="object store"):
        _record(catalog, "run-2")
