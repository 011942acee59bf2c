"""Files of other services are there whole or not at all, whatever happens to the catalog."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.upkeep.backup import restore_backup
from foretoken.domain.errors import (
    CorruptCatalogError,
    InvalidRequestError,
    StorageFullError,
)
from foretoken.domain.measurements.measurement import Artifact, PruneRequest, SqlQuery
from foretoken.wire.arrow import read_table

_KIND = "latency_models"
_CONTENT = bytes(range(256)) * 8192 + b"end"  # 2 MiB and some
_NUM_KILLS = 3
_PRELUDE = """
import hashlib, json, random, sys
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.errors import StorageFullError
def store(content):
    digest = hashlib.sha256(content).hexdigest()
    artifact = Artifact(kind="latency_models", name="model", content_hash=digest,
                        num_bytes=len(content), created_at="2026-01-01T00:00:00Z")
    return catalog.store_artifact(artifact, [content])
catalog = CatalogService(CatalogConfig(path=sys.argv[1], num_threads=1))
catalog.open()
"""
_REPLACE_FOREVER = """
print("open", flush=True)
number = int(sys.argv[2])
while True:
    store(random.Random(number).randbytes(1_000_000 + number))
    print(number, flush=True)
    number += 1
"""
_FILL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kept = store(b"small").content_hash
def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
limit(3_000_000)
said = []
for num_bytes in (8_000_000, 2_999_000):
    try:
        store(random.Random(0).randbytes(num_bytes))
    except StorageFullError as err:
        said.append(err.reason)
content = b"".join(catalog.read_artifact("latency_models", "model"))
limit(resource.RLIM_INFINITY)
again = store(random.Random(0).randbytes(8_000_000)).num_bytes
catalog.close()
print(json.dumps([said, content.decode(), again]))
"""


def _artifact(name: str, content: bytes) -> Artifact:
    return Artifact(
        kind=_KIND,
        name=name,
        content_hash=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        created_at="2026-01-02T03:04:05.678+00:00",
        metadata_json='{"num_rows": 12}',
    )


def _store(catalog: CatalogService, name: str, content: bytes = _CONTENT) -> Artifact:
    return catalog.store_artifact(_artifact(name, content), [content])


def _read(catalog: CatalogService, name: str) -> bytes:
    return b"".join(catalog.read_artifact(_KIND, name))


def _count_chunk_bytes(catalog: CatalogService) -> int:
    with catalog._store.cursor() as cursor:
        query = "SELECT coalesce(sum(octet_length(content)), 0)::BIGINT FROM artifact_chunk"
        ((num_bytes,),) = cursor.execute(query).fetchall()
    return int(num_bytes)


@pytest.fixture
def open_at() -> Iterator[Callable[[Path], CatalogService]]:
    opened = []

    def open_at(path: Path) -> CatalogService:
        opened.append(CatalogService(CatalogConfig(path=str(path), num_threads=1)))
        opened[-1].open()
        return opened[-1]

    yield open_at
    for service in opened:
        service.close()


def test_nothing_is_left_of_what_was_replaced_or_deleted(catalog: CatalogService) -> None:
    for name in ("v1", "v2"):
        _store(catalog, name)
    _store(catalog, "v1", b"short")
    assert len(_CONTENT) + len(b"short") == _count_chunk_bytes(catalog)
    for name in ("v1", "v2"):
        catalog.delete_artifact(_KIND, name)
    assert 0 == _count_chunk_bytes(catalog)
    assert [] == list(catalog._store.scratch_folder.iterdir())


def test_a_refused_content_leaves_no_piece(catalog: CatalogService) -> None:
    with pytest.raises(InvalidRequestError):
        catalog.store_artifact(_artifact("v1", _CONTENT), [_CONTENT[:-1]])
    assert 0 == _count_chunk_bytes(catalog)


def test_the_same_is_not_asked_for_again(catalog: CatalogService) -> None:
    def refuse() -> Iterator[bytes]:
        raise AssertionError
        yield b""

    stored = _store(catalog, "v1")
    assert stored == catalog.store_artifact(_artifact("v1", _CONTENT), refuse())


def test_a_slow_sender_keeps_nobody_from_recording(catalog: CatalogService) -> None:
    def send() -> Iterator[bytes]:
        yield _CONTENT[:100]
        list(catalog.record(run(), batches(gemms([1]))))
        yield _CONTENT[100:]

    catalog.store_artifact(_artifact("v1", _CONTENT), send())
    assert ["run-1"] == [summary.run.run_id for summary in catalog.list_runs()]
    assert _CONTENT == _read(catalog, "v1")


def test_who_reads_is_not_disturbed_by_a_replacement(catalog: CatalogService) -> None:
    _store(catalog, "v1")
    reading = catalog.read_artifact(_KIND, "v1")
    first = next(reading)
    _store(catalog, "v1", b"other")
    catalog.compact()
    assert _CONTENT == first + b"".join(reading)


@pytest.mark.slow
def test_backup_restore_compaction_and_pruning_keep_files(
    catalog: CatalogService, open_at: Callable[[Path], CatalogService], tmp_path: Path
) -> None:
    list(catalog.record(run(), batches(gemms([1]))))
    _store(catalog, "v2", b"short")
    _store(catalog, "v1")
    catalog.activate_artifact(_KIND, "v1")
    expected = catalog.list_artifacts(_KIND)
    (tmp_path / "backup").write_bytes(b"".join(catalog.backup()))
    assert ("run-1",) == catalog.prune(PruneRequest(older_than_days=0.0)).deleted_run_ids
    catalog.compact()
    restore_backup(tmp_path / "backup", tmp_path / "restored.duckdb")
    for service in (catalog, open_at(tmp_path / "restored.duckdb")):
        assert expected == service.list_artifacts(_KIND)
        assert (_CONTENT, b"short") == (_read(service, "v1"), _read(service, "v2"))


def test_compaction_gives_the_room_of_deleted_files_back(catalog: CatalogService) -> None:
    _store(catalog, "v1")
    catalog.delete_artifact(_KIND, "v1")
    report = catalog.compact()
    assert report.bytes_after < len(_CONTENT) < report.bytes_before


def test_a_backup_without_a_piece_is_refused(catalog: CatalogService, tmp_path: Path) -> None:
    _store(catalog, "v1")
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM artifact_chunk WHERE first_byte = 0")
    (tmp_path / "backup").write_bytes(b"".join(catalog.backup()))
    with pytest.raises(CorruptCatalogError, match="1 artifacts are not whole"):
        restore_backup(tmp_path / "backup", tmp_path / "restored.duckdb")


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM artifact_chunk WHERE first_byte = 0",
        "UPDATE artifact_chunk SET content = 'x'::BLOB WHERE first_byte = 0",
        "UPDATE artifact_chunk SET first_byte = first_byte + 1",
    ],
)
def test_a_damaged_content_is_said_before_any_of_it_is_given(
    damage: str, catalog: CatalogService
) -> None:
    _store(catalog, "v1")
    with catalog._store.transaction() as cursor:
        cursor.execute(damage)
    with pytest.raises(CorruptCatalogError, match="latency_models/v1 is damaged"):
        next(catalog.read_artifact(_KIND, "v1"))


def test_sql_shows_what_is_known_of_files_but_not_their_content(catalog: CatalogService) -> None:
    stored = _store(catalog, "v1")
    question = "SELECT * REPLACE (created_at::VARCHAR AS created_at) FROM artifacts"
    answer = read_table(catalog.query_sql(SqlQuery(text=question))).to_pylist()
    assert [
        {
            "kind": _KIND,
            "name": "v1",
            "content_hash": stored.content_hash,
            "num_bytes": len(_CONTENT),
            "created_at": "2026-01-02 03:04:05.678",
            "metadata_json": '{"num_rows": 12}',
            "is_active": False,
        }
    ] == answer
    with pytest.raises(InvalidRequestError, match="requests 'artifact_chunk'"):
        catalog.query_sql(SqlQuery(text="SELECT content FROM artifact_chunk"))


@pytest.mark.slow
def test_a_file_may_be_kept_when_the_memory_is_smaller(tmp_path: Path) -> None:
    """Whatever else is kept: DuckDB takes up large values of many rows at once."""
    content = _CONTENT * 10
    config = CatalogConfig(path=str(tmp_path / "c.duckdb"), num_threads=1, memory_limit="64MB")
    service = CatalogService(config)
    service.open()
    for number in range(4):
        _store(service, f"v{number}", content + bytes([number]))
    service.compact()
    assert content + b"\x02" == _read(service, "v2")
    service.close()


def _run_program(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _PRELUDE + script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_kill_leaves_the_old_or_the_new_file_whole(
    open_at: Callable[[Path], CatalogService], tmp_path: Path
) -> None:
    """What was acknowledged is there, or what came after it."""
    path = tmp_path / "catalog.duckdb"
    stored = 0
    for number in range(_NUM_KILLS):
        with _run_program(_REPLACE_FOREVER, str(path), str(stored + 1)) as process:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            time.sleep(0.03 * number)
            process.kill()
            acknowledged = max([int(line) for line in process.stdout], default=stored + 2)
        service = open_at(path)
        (artifact,) = service.list_artifacts(_KIND)
        stored = artifact.num_bytes - 1_000_000
        assert acknowledged <= stored <= acknowledged + 1
        assert artifact.num_bytes == len(_read(service, "model")) == _count_chunk_bytes(service)
        service.close()


@pytest.mark.slow
def test_a_full_disk_is_said_and_what_was_there_stays(tmp_path: Path) -> None:
    """Whether the content does not fit, or only the catalog with it."""
    output, _ = _run_program(_FILL_DISK, str(tmp_path / "catalog.duckdb")).communicate(timeout=120)
    said, content, again = json.loads(output)
    assert ([StorageFullError.reason] * 2, "small") == (said, content)
    assert 8_000_000 == again


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(InvalidRequestError, match="max_artifact_bytes: must be positive"):
        CatalogConfig(path="catalog.duckdb", max_artifact_bytes=0)
