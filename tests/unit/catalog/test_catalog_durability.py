"""Acknowledged is on disk, whatever happens to the process or the disk afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import RunKind

_NUM_KILLS = 100
_SEED = 20260101

# A limit on the size of files stands in for a full disk. Batches are sent until one is refused,
# then once more where there is room again. Arguments: rows of a batch; when to merge the log.
_FILL_DISK = """
import json, resource, signal, sys
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from catalog_rows import gemms, run
from foretoken.catalog.storage.attachment import FileAttachment
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.recording.ingest import Ingest
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import StorageFullError
from foretoken.domain.measurements.measurement import MeasurementBatch

path, num_rows, max_log_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = gemms(range(1, num_rows + 1))

def batches():
    return (MeasurementBatch(batch_index=index, rows=rows) for index in count())

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

attachment = FileAttachment(Path(path), max_log_bytes)
store = Store(CatalogConfig(path=path, num_threads=1), attachment)
store.open()
service = Ingest(store, lambda: datetime.now(UTC), 1_000_000)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit(3_000_000)
receipts = []
try:
    for receipt in service.record(run(), batches()):
        receipts.append(receipt.batch_index)
except StorageFullError as err:
    message = err.message
limit(resource.RLIM_INFINITY)
again = []
for receipt in service.record(run(), batches()):
    again.append(receipt.was_duplicate)
    if receipt.batch_index == len(receipts) + 1:
        break
store.close()
print(json.dumps([message, receipts, again]))
"""


def _run_program(*arguments: str) -> str:
    # What this test can import, `catalog_rows` among it, its processes can.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ).stdout


def _open(path: Path) -> CatalogService:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    return service


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[tuple[str, int]]]:
    """A catalog whose writers were all killed, and the batches they had acknowledged."""
    path = tmp_path_factory.mktemp("crash") / "catalog.duckdb"
    program = Path(__file__).with_name("crashing_ingest.py")
    said = _run_program(str(program), str(path), str(_NUM_KILLS), str(_SEED))
    return path, {(run_id, index) for run_id, index in map(json.loads, said.splitlines())}


@pytest.fixture
def survived(crashed: tuple[Path, set[tuple[str, int]]]) -> Iterator[CatalogService]:
    service = _open(crashed[0])
    yield service
    service.close()


def _receipts(service: CatalogService) -> dict[tuple[str, int], int]:
    with service._store.cursor() as cursor:
        rows = cursor.execute("SELECT run_id, batch_index, num_rows FROM batch").fetchall()
    return {(run_id, index): num_rows for run_id, index, num_rows in rows}


def _stored_rows(service: CatalogService) -> dict[tuple[str, int], int]:
    """Return the rows there are by batch, those of imports that nobody may read yet included."""
    with service._store.cursor() as cursor:
        rows = cursor.execute(
            "SELECT run_id, batch_index, count(DISTINCT row_index), count(*) FROM measurement"
            " LEFT JOIN batch USING (batch_number) GROUP BY ALL"
        ).fetchall()
    assert all(distinct == total for _, _, distinct, total in rows)
    return {(run_id, index): total for run_id, index, _, total in rows}


@pytest.mark.slow
def test_no_acknowledged_batch_is_lost(
    crashed: tuple[Path, set[tuple[str, int]]], survived: CatalogService
) -> None:
    _, acknowledged = crashed
    assert _NUM_KILLS <= len(acknowledged)
    assert set() == acknowledged - _receipts(survived).keys()


@pytest.mark.slow
def test_no_batch_is_there_in_part(survived: CatalogService) -> None:
    assert _receipts(survived) == _stored_rows(survived)


@pytest.mark.slow
def test_an_import_cut_short_is_resumed_and_doubles_nothing(survived: CatalogService) -> None:
    """Whoever sends all again completes the run, and what was there is recognised."""
    before = _receipts(survived)
    imports = [s.run for s in survived.list_runs() if s.run.kind is RunKind.IMPORT]
    chosen = max(imports, key=lambda run: sum(run.run_id == run_id for run_id, _ in before))
    there = {index: rows for (run_id, index), rows in before.items() if run_id == chosen.run_id}
    tables = [gemms(range(1, there[0] + 1)) for _ in range(len(there) + 3)]
    receipts = list(survived.record(chosen, batches(*tables)))
    found = {receipt.batch_index for receipt in receipts if receipt.was_duplicate}
    assert set(there) == found
    after = next(s for s in survived.list_runs() if s.run.run_id == chosen.run_id)
    assert "" != after.completed_at
    assert len(tables) * there[0] == after.num_rows
    assert _receipts(survived) == _stored_rows(survived)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "merge_at"),
    [(50, 10**9), (2000, 10**9), (70_000, 10**9), (500, 300_000)],
    ids=["small", "middle", "past the log", "while the log is merged"],
)
def test_a_full_disk_is_said_and_room_lets_the_same_process_go_on(
    num_rows: int, merge_at: int, tmp_path: Path
) -> None:
    """The batch that did not fit may be there or not; the others are, each once."""
    path = tmp_path / "catalog.duckdb"
    message, receipts, again = json.loads(
        _run_program("-c", _FILL_DISK, str(path), str(num_rows), str(merge_at))
    )
    assert "no room on its disk" in message
    assert list(range(len(receipts))) == receipts
    assert [True] * len(receipts) == again[: len(receipts)]
    service = _open(path)
    expected = {("run-1", index): num_rows for index in range(len(again))}
    assert (expected, expected) == (_receipts(service), _stored_rows(service))
    service.close()


def test_what_was_recorded_before_an_error_of_the_stream_stays(tmp_path: Path) -> None:
    """A source that breaks off after some batches of a group has the receipts of those."""

    class SourceBrokeError(Exception):
        pass

    def breaking_off() -> Iterator[object]:
        yield from batches(gemms([1]), gemms([2]), is_complete=False)
        raise SourceBrokeError

    service = _open(tmp_path / "catalog.duckdb")
    recording = service.record(run(kind=RunKind.IMPORT), breaking_off())  # type: ignore[arg-type]
    assert [0, 1] == [next(recording).batch_index, next(recording).batch_index]
    with pytest.raises(SourceBrokeError):
        next(recording)
    assert {("run-1", 0): 1, ("run-1", 1): 1} == _stored_rows(service)
    service.close()
