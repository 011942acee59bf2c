"""What each caller may record and query of a catalog."""

from collections.abc import Iterator

import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.caller import answering
from foretoken.domain.errors import InvalidRequestError, QuotaError
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.wire.arrow import read_table

_ROWS = gemms(range(1, 50))


@pytest.fixture
def catalog(catalog_path: str) -> Iterator[CatalogService]:
    service = CatalogService(
        CatalogConfig(
            path=catalog_path,
            num_threads=1,
            max_recorded_bytes_per_caller=_ROWS.nbytes // 2,
            sql_s_per_caller=1e-6,
        )
    )
    service.open()
    yield service
    service.close()


def test_a_caller_records_so_many_bytes_a_day(catalog: CatalogService) -> None:
    """What was sent before is stored; others, and this program itself, are not concerned."""
    with answering("ada"):
        assert 1 == len(list(catalog.record(run("first"), batches(_ROWS))))
        with pytest.raises(QuotaError, match=r"ada has used up its [0-9.e+]+ bytes"):
            list(catalog.record(run("second"), batches(_ROWS)))
    for name in ("bob", ""):
        with answering(name):
            assert 1 == len(list(catalog.record(run(f"of-{name}"), batches(_ROWS))))
    assert 3 == len([one for one in catalog.list_runs() if one.num_rows])


def test_a_caller_queries_for_so_long_an_hour(catalog: CatalogService) -> None:
    question = SqlQuery(text="SELECT 1 AS one")
    with answering("ada"):
        assert 1 == read_table(catalog.query_sql(question)).num_rows
        with pytest.raises(QuotaError, match="seconds of SQL an hour"):
            catalog.query_sql(question)
    with answering("bob"):
        assert 1 == read_table(catalog.query_sql(question)).num_rows


@pytest.mark.parametrize("name", ["max_recorded_bytes_per_caller", "sql_s_per_caller"])
def test_a_quota_below_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        CatalogConfig(path="x.duckdb", **{name: -1})  # type: ignore[arg-type]
