"""A question in SQL ends with the call it came by: nobody reads what it would answer."""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from loopback import serve

from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurements.measurement import SqlQuery

pytestmark = pytest.mark.slow

# DuckDB does not look whether it is interrupted within one value.
_UNINTERRUPTIBLE = "SELECT levenshtein(repeat('ab', 300000), repeat('ba', 300000))"
_ENDLESS = SqlQuery(text="FROM range(1000000000000)")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CatalogService]:
    """A catalog that leaves a question more time and memory than a test has."""
    config = CatalogConfig(
        path=str(tmp_path / "catalog.duckdb"),
        num_threads=1,
        sql_timeout_s=3600.0,
        sql_memory_limit="8GB",
        sql_max_rows=10**12,
    )
    service = CatalogService(config)
    service.open()
    yield service
    service.close()


@pytest.fixture
def options(service: CatalogService) -> Iterator[ChannelOptions]:
    with serve(servicer.register, service) as options:
        yield options


def _wait_until_over(service: CatalogService) -> None:
    """Fails by never returning; the counters are those that operators see."""
    while service.sql_statistics().num_running or service.num_readers:
        time.sleep(0.01)
    assert {} == service.sql_statistics().limits_hit


def test_it_ends_with_the_deadline(service: CatalogService, options: ChannelOptions) -> None:
    with (
        CatalogClient.connect(replace(options, stream_deadline_s=3.0)) as client,
        pytest.raises(ServiceUnavailableError),
    ):
        client.query_sql(SqlQuery(text=_UNINTERRUPTIBLE))
    _wait_until_over(service)


def test_it_ends_with_a_reader_that_is_let_go(
    service: CatalogService, options: ChannelOptions
) -> None:
    with CatalogClient.connect(options) as client:
        reader = client.query_sql(_ENDLESS)
        assert isinstance(reader, pa.RecordBatchReader)
        reader.read_next_batch()
        del reader
        gc.collect()
        _wait_until_over(service)


def test_it_ends_with_the_connection(service: CatalogService, options: ChannelOptions) -> None:
    client = CatalogClient.connect(options)
    reader = client.query_sql(_ENDLESS)
    client.close()
    _wait_until_over(service)
    del reader
