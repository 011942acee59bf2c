"""What operators can watch of a catalog."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from foretoken.app.service_metrics import CatalogMetrics
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind, SqlQuery
from foretoken.wire.arrow import read_table, rows_to_table


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=str(tmp_path / "catalog.duckdb"), num_threads=1))
    service.open()
    yield service
    service.close()


def _batch(index: int, device: str = "a30") -> MeasurementBatch:
    row = {
        "operator": "gemm",
        "phase": "forward",
        "dtype": "bf16",
        "dims": {"m": 64, "n": 4096, "k": 4096},
        "device": device,
        "latency_us_median": 100.0,
        "status": "ok",
    }
    return MeasurementBatch(batch_index=index, rows=rows_to_table([row]))


def test_metrics_count_what_happened(catalog: CatalogService) -> None:
    run = Run(run_id="run-1", kind=RunKind.PROFILE, tool="test")
    list(catalog.record(run, [_batch(0), _batch(1)]))
    list(catalog.record(run, [_batch(1)]))
    with pytest.raises(InvalidRequestError):
        list(catalog.record(run, [_batch(-1)]))
    read_table(catalog.query_sql(SqlQuery(text="SELECT 1")))
    registry = CollectorRegistry()
    registry.register(CatalogMetrics(catalog))
    found = {
        name: registry.get_sample_value(f"foretoken_catalog_{name}")
        for name in ("rows_total", "batches_total", "duplicate_batches_total", "sql_queries_total")
    }
    assert found == {
        "rows_total": 2.0,
        "batches_total": 2.0,
        "duplicate_batches_total": 1.0,
        "sql_queries_total": 1.0,
    }
    reason = {"reason": "INVALID_REQUEST"}
    assert registry.get_sample_value("foretoken_catalog_rejects_total", reason) == 1.0
    assert registry.get_sample_value("foretoken_catalog_users") == 0.0
    size = registry.get_sample_value("foretoken_catalog_storage_bytes")
    assert size == float(catalog.size_bytes()) > 0
    assert b"foretoken_catalog_ingest_seconds_total" in generate_latest(registry)
