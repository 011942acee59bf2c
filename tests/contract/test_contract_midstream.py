"""What goes wrong in the middle of a stream keeps its class, embedded and remote."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from contract_reach import Reach
from contract_rows import make_batches, make_rows, make_run

from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import (
    CorruptCatalogError,
    QueryLimitError,
    StorageFullError,
    UnknownDeviceError,
)
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    BatchReceipt,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    SqlQuery,
)
from foretoken.domain.ports import CatalogPort
from foretoken.wire.arrow import open_stream

_NUM_ROWS = 100_000
_NUM_BATCHES = 4
# Where a block begins in a file of DuckDB.
_HEADER_BYTES, _BLOCK_BYTES = 3 * 4096, 262_144


@contextmanager
def _opened(path: str) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=path, num_threads=1, sql_max_rows=_NUM_ROWS - 1))
    service.open()
    yield service
    service.close()


@pytest.fixture
def service(catalog_path: str) -> Iterator[CatalogService]:
    with _opened(catalog_path) as service:
        yield service


@pytest.fixture
def port(service: CatalogService, reach: Reach) -> CatalogPort:
    port: CatalogPort = reach(service, servicer.register, CatalogClient.connect)
    return port


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, make_catalog_path: Callable[[Path], str]
) -> Path:
    """The folder of a catalog of many rows, closed."""
    folder = tmp_path_factory.mktemp("recorded")
    service = CatalogService(CatalogConfig(path=make_catalog_path(folder), num_threads=1))
    service.open()
    rows = make_rows(range(1, 1 + _NUM_ROWS))
    last = _NUM_BATCHES - 1
    list(
        service.record(
            make_run(),
            [
                MeasurementBatch(batch_index=index, rows=rows, is_last=index == last)
                for index in range(_NUM_BATCHES)
            ],
        )
    )
    service.close()
    return folder


@pytest.fixture
def large_path(recorded: Path, tmp_path: Path) -> Path:
    """A copy of that catalog."""
    shutil.copytree(recorded, tmp_path / "large")
    return tmp_path / "large" / "catalog.duckdb"


def _read(rows: ArrowStream) -> Iterator[int]:
    for piece in open_stream(rows):
        yield piece.num_rows


@pytest.mark.slow
def test_a_limit_met_after_the_first_rows(large_path: Path, reach: Reach) -> None:
    query = SqlQuery(text="SELECT m, n, k, latency_us_median FROM op_gemm")
    with _opened(str(large_path)) as service:
        port = reach(service, servicer.register, CatalogClient.connect)
        pieces = _read(port.query_sql(query))
        assert 0 < next(pieces)
        with pytest.raises(QueryLimitError) as caught:
            list(pieces)
    assert {"limit": "rows"} == caught.value.details


def _damage_times(path: Path) -> None:
    """Damage the block that holds the last times in the file."""
    with _opened(str(path)) as service, service._store.cursor() as cursor:
        ((block,),) = cursor.execute(
            "SELECT max(block_id) FROM pragma_storage_info('measurement')"
            " WHERE column_name = 'latency_us_median'"
        ).fetchall()
    content = bytearray(path.read_bytes())
    content[_HEADER_BYTES + block * _BLOCK_BYTES + 1_000] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.slow
def test_damage_met_while_rows_are_read(large_path: Path, reach: Reach) -> None:
    _damage_times(large_path)
    with _opened(str(large_path)) as service:
        port = reach(service, servicer.register, CatalogClient.connect)
        with pytest.raises(CorruptCatalogError, match="is damaged"):
            list(_read(port.read_measurements(MeasurementFilter())))


class _FullAfterOne(CatalogService):
    """A catalog whose disk is full after the first batch."""

    def record(self, run: Run, batches: Any) -> Iterator[BatchReceipt]:
        yield next(super().record(run, iter(batches)))
        raise StorageFullError("has no room on its disk")


def test_a_disk_that_becomes_full(tmp_path: Path, reach: Reach) -> None:
    service = _FullAfterOne(CatalogConfig(path=str(tmp_path / "full.duckdb"), num_threads=1))
    service.open()
    port = reach(service, servicer.register, CatalogClient.connect)
    receipts = port.record(make_run(), make_batches(3))
    assert 0 == next(receipts).batch_index
    with pytest.raises(StorageFullError, match="no room"):
        next(receipts)
    service.close()


def test_a_bad_batch_among_many(port: CatalogPort) -> None:
    """The sender gets the receipts of all before it, and may send the rest again."""
    whole = make_batches(150)
    bad = MeasurementBatch(batch_index=100, rows=make_rows([1], device="a3000"))
    found: list[int] = []
    with pytest.raises(UnknownDeviceError, match="batch 100: "):
        _record_into(found, port, [*whole[:100], bad, *whole[101:]])
    assert list(range(100)) == found
    receipts = list(port.record(make_run(), whole))
    assert 100 == sum(receipt.was_duplicate for receipt in receipts)
    assert 600 == pa.table(port.read_measurements(MeasurementFilter())).num_rows


def _record_into(found: list[int], port: CatalogPort, batches: list[MeasurementBatch]) -> None:
    found.extend(receipt.batch_index for receipt in port.record(make_run(), batches))


def test_two_senders_of_one_run_and_one_that_leaves(port: CatalogPort) -> None:
    """Whoever comes first, every batch is there once, and both have all receipts."""
    whole = make_batches(200)
    leaving = port.record(make_run(), whole)
    next(iter(leaving))
    leaving.close()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(lambda: list(port.record(make_run(), whole))) for _ in range(2)]
        receipts = [work.result(timeout=60) for work in sent]
    assert [list(range(200))] * 2 == [[one.batch_index for one in each] for each in receipts]
    assert 800 == pa.table(port.read_measurements(MeasurementFilter())).num_rows


def test_a_sender_that_never_ends_the_run_gets_all_receipts(port: CatalogPort) -> None:
    """More than two groups, and the last of them not full."""
    endless = make_batches(151)[:150]
    assert list(range(150)) == [one.batch_index for one in port.record(make_run(), endless)]
    assert "" == port.list_runs()[0].completed_at
