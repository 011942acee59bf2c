"""Other processes read the catalog's file while it is written, and always see one state of it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.recording.ingest import Ingest
from foretoken.catalog.sql.query_service import SqlQueryService
from foretoken.catalog.storage.attachment import FileAttachment
from foretoken.catalog.storage.store import Store
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.wire.arrow import read_table

pytestmark = pytest.mark.slow

_BATCH_ROWS = 500
# So small that the log is merged at every few commits.
_LOG_BYTES = 200_000
_QUESTION = SqlQuery(
    text="SELECT count(*), coalesce(sum(m), 0)::BIGINT, count(DISTINCT run_id) FROM op_gemm"
)


class _Catalog:
    """A store, what records into it, and what answers questions about it."""

    def __init__(self, path: Path, log_bytes: int) -> None:
        # Several threads read the file at once.
        config = CatalogConfig(path=str(path), num_threads=4)
        self.store = Store(config, FileAttachment(path, log_bytes))
        self.ingest = Ingest(self.store, lambda: datetime.now(UTC), 1_000_000)
        self.query_service = SqlQueryService(self.store, config)
        self.store.open()
        self.query_service.open()

    def record(self, index: int, num_rows: int = _BATCH_ROWS) -> None:
        list(self.ingest.record(run(f"run-{index}"), batches(gemms(range(1, num_rows + 1)))))

    def ask(self) -> tuple[int, int, int]:
        (row,) = read_table(self.query_service.ask(_QUESTION)).to_pylist()
        num_rows, total, num_runs = row.values()
        return num_rows, total, num_runs

    def close(self) -> None:
        self.query_service.close()
        self.store.close()


@pytest.fixture
def shared(catalog_path: str) -> Iterator[_Catalog]:
    catalog = _Catalog(Path(catalog_path), _LOG_BYTES)
    yield catalog
    catalog.close()


def _log_bytes(catalog: _Catalog) -> int:
    return catalog.store.size_bytes() - Path(catalog.store.attachment.name).stat().st_size


def test_what_was_acknowledged_is_seen_by_the_next_question(shared: _Catalog) -> None:
    for index in range(20):
        shared.record(index)
        assert index + 1 == shared.ask()[2]


def test_every_answer_is_of_one_state_while_recording_goes_on(shared: _Catalog) -> None:
    """Rows of a batch are there together, and no answer is older than the one before."""
    stopped = threading.Event()
    recorded: list[int] = []

    def record() -> None:
        for index in count():
            if stopped.is_set():
                return
            shared.record(index)
            recorded.append(index)

    with ExitStack() as stack:
        recorder = threading.Thread(target=record)
        recorder.start()
        stack.callback(recorder.join)
        stack.callback(stopped.set)
        seen = 0
        for _ in range(12):
            num_acknowledged = len(recorded)
            num_rows, total, num_runs = shared.ask()
            assert (num_runs * _BATCH_ROWS, num_runs * sum(range(_BATCH_ROWS + 1))) == (
                num_rows,
                total,
            )
            assert max(seen, num_acknowledged) <= num_runs
            seen = num_runs
    assert len(recorded) == shared.ask()[2]


def test_the_file_is_not_rewritten_while_it_is_read(shared: _Catalog) -> None:
    """The log grows instead, and is merged when the reader is gone."""
    shared.record(0, 5_000)
    reader = shared.query_service.ask(
        SqlQuery(text="FROM measurements, range(1000)", max_num_rows=10**6)
    )
    assert isinstance(reader, pa.RecordBatchReader)
    reader.read_next_batch()
    index = count(1)
    while _log_bytes(shared) < 3 * _LOG_BYTES:
        shared.record(next(index), 5_000)
    del reader
    shared.record(next(index))
    assert _log_bytes(shared) < _LOG_BYTES


def test_a_large_log_is_merged_before_it_is_read(shared: _Catalog) -> None:
    """A process that reads the file takes the log up row by row, which takes its time."""
    shared.record(0)
    while _log_bytes(shared) < _LOG_BYTES // 4:
        shared.record(1 + _log_bytes(shared))
    shared.ask()
    assert 0 == _log_bytes(shared)


def test_a_compacted_file_is_opened_anew(tmp_path: Path) -> None:
    """The process that answered before has the file of before open."""
    catalog = _Catalog(tmp_path / "catalog.duckdb", 10**9)
    catalog.record(0)
    assert 1 == catalog.ask()[2]
    with catalog.store.exclusive(), catalog.store.idle(60.0):
        pass
    catalog.record(1)
    assert 2 == catalog.ask()[2]
    catalog.close()
