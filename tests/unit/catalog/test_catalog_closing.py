"""Closing a catalog that is in use, and errors that come while rows are read."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import CatalogBusyError, CorruptCatalogError, ForetokenError
from foretoken.domain.measurements.measurement import MeasurementFilter, RunKind, SqlQuery
from foretoken.wire.arrow import open_stream, read_table

_SLOW = "SELECT sum(sin(a.m * b.n + c.k)) FROM op_gemm a, op_gemm b, op_gemm c"


def test_closing_ends_a_query_that_runs(catalog: CatalogService) -> None:
    """A service that has to stop does not wait for it, nor fail because of it."""
    list(catalog.record(run(), batches(gemms(range(1, 20_000)))))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: read_table(catalog.query_sql(SqlQuery(text=_SLOW))))
        while not catalog.sql_statistics().num_running:
            time.sleep(0.01)
        time.sleep(0.3)
        closing = threading.Thread(target=catalog.close)
        closing.start()
        with pytest.raises(ForetokenError):
            asked.result(timeout=60)
        closing.join(timeout=60)
    assert not closing.is_alive()
    catalog.open()
    assert 1 == len(catalog.list_runs())


@pytest.mark.slow
def test_rows_half_read_keep_the_file_until_they_are_let_go(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(*[gemms(range(1, 100_000))] * 3)))
    rows = open_stream(catalog.read_measurements(MeasurementFilter()))
    rows.read_next_batch()
    catalog.close()
    with pytest.raises(CatalogBusyError, match="open in this process already"):
        catalog.open()
    del rows
    gc.collect()
    catalog.open()
    assert 1 == len(catalog.list_runs())


# Where a block begins in a file of DuckDB.
_HEADER_BYTES, _BLOCK_BYTES = 3 * 4096, 262_144


@pytest.fixture
def damaged(catalog: CatalogService, tmp_path: Path) -> CatalogService:
    """A catalog whose rows cannot all be read: the block of the last times is damaged."""
    list(catalog.record(run("run", RunKind.IMPORT), batches(*[gemms(range(1, 100_000))] * 4)))
    catalog.close()
    catalog.open()
    with catalog._store.cursor() as cursor:
        ((block,),) = cursor.execute(
            "SELECT max(block_id) FROM pragma_storage_info('measurement')"
            " WHERE column_name = 'latency_us_median'"
        ).fetchall()
    catalog.close()
    path = tmp_path / "catalog.duckdb"
    content = bytearray(path.read_bytes())
    content[_HEADER_BYTES + block * _BLOCK_BYTES + 1_000] ^= 0xFF
    path.write_bytes(content)
    catalog.open()
    return catalog


def test_damage_found_while_rows_are_read_is_said(damaged: CatalogService) -> None:
    """It comes through a stream of Arrow data, which knows no classes of errors."""
    for read in (
        lambda: read_table(damaged.read_measurements(MeasurementFilter())),
        lambda: damaged.create_snapshot(MeasurementFilter()),
        lambda: list(damaged.backup()),
    ):
        with pytest.raises(CorruptCatalogError, match=r"catalog\.duckdb is damaged"):
            read()
