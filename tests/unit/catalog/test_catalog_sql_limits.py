"""A question ends within its limits, whatever it is at, and recording goes on meanwhile."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    CatalogBusyError,
    ForetokenError,
    InvalidRequestError,
    QueryLimitError,
    QueueFullError,
)
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.wire.arrow import read_table
from foretoken.wire.ipc import write_chunks

pytestmark = pytest.mark.slow

_ENDLESS = "FROM range(1000000000000)"
_TIMEOUT_S = 1.0
_RUNAWAYS = {
    "cross join": "SELECT count(*) FROM range(1000000000) AS a, range(1000000000) AS b",
    "cross join kept": "SELECT count(DISTINCT hash(a.range, b.range)) FROM range(100000) AS a,"
    " range(100000) AS b",
    "sort": "SELECT i FROM range(1000000000) AS t(i) ORDER BY hash(i)",
    "window": "SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY hash(i)) AS n"
    " FROM range(1000000000) AS t(i))",
    "recursion": "WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM t)"
    " SELECT max(i) FROM t",
    "recursion kept": "WITH RECURSIVE t(i) AS (SELECT 1 UNION SELECT i + 1 FROM t) FROM t",
    "doubling": "WITH RECURSIVE t(s) AS (SELECT 'xxxxxxxxxx' UNION ALL SELECT s || s FROM t"
    " WHERE length(s) < 4000000000) SELECT max(length(s)) FROM t",
    "list": "SELECT len(list(i)) FROM range(10000000000) AS t(i)",
    "text": "SELECT length(string_agg('xxxxxxxxxxxxxxxxxxxx', '')) FROM range(10000000000)",
    "histogram": "SELECT histogram(i) FROM range(10000000000) AS t(i)",
    "regex": "SELECT count(*) FROM range(1000000000) AS t(i)"
    " WHERE regexp_matches(concat('aaaaaaaaaaaaaaaaaaaaaaaaa', i), '^(a+)+$')",
    "stream": _ENDLESS,
}


@pytest.fixture
def limited(catalog_path: str) -> Iterator[Callable[..., CatalogService]]:
    """Opens a catalog with limits of one's own."""
    opened: list[CatalogService] = []

    def open_with(**limits: float | str) -> CatalogService:
        config = CatalogConfig(
            path=catalog_path,
            num_threads=1,
            **limits,  # type: ignore[arg-type]
        )
        service = CatalogService(config)
        service.open()
        opened.append(service)
        return service

    yield open_with
    for service in opened:
        service.close()


class _Recorder:
    """Records a run of batch after batch until it is stopped.

    As clients do, it sends again what found the catalog busy: a query may hold all memory for the
    moment in which a batch needs some.
    """

    def __init__(self, catalog: CatalogService) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._record, args=(catalog,))
        self.num_batches = 0
        self.error: ForetokenError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def wait_for_more(self) -> None:
        """Wait until one more batch is stored."""
        goal = self.num_batches + 1
        while self.num_batches < goal and self.error is None:
            time.sleep(0.01)

    def _record(self, catalog: CatalogService) -> None:
        rows = gemms(range(1, 1001))
        while not self._stopped.is_set() and self.error is None:
            try:
                list(catalog.record(run(f"run-{self.num_batches}"), batches(rows)))
            except CatalogBusyError:
                continue
            except ForetokenError as err:
                self.error = err
            self.num_batches += 1


def _read_and_forget(catalog: CatalogService, text: str) -> None:
    for rows in catalog.query_sql(SqlQuery(text=text)):  # type: ignore[attr-defined]
        del rows


def _wait_until_over(catalog: CatalogService) -> None:
    while catalog.sql_statistics().num_running or catalog.num_readers:
        time.sleep(0.01)


def test_what_runs_away_is_stopped_while_recording_goes_on(
    limited: Callable[..., CatalogService],
) -> None:
    catalog = limited(memory_limit="600MB", sql_timeout_s=_TIMEOUT_S)
    ended: dict[str, str] = {}
    with _Recorder(catalog) as recorder:
        for name, text in _RUNAWAYS.items():
            with pytest.raises(QueryLimitError) as caught:
                _read_and_forget(catalog, text)
            ended[name] = caught.value.details["limit"]
            recorder.wait_for_more()
    assert recorder.error is None
    assert {"time", "memory", "rows"} >= set(ended.values())
    assert len(_RUNAWAYS) == sum(catalog.sql_statistics().limits_hit.values())
    counted = read_table(catalog.query_sql(SqlQuery(text="SELECT count(*) FROM measurements")))
    assert recorder.num_batches * 1000 == counted.column(0)[0].as_py()


def test_its_own_limit_of_time_may_be_smaller_but_not_larger(
    limited: Callable[..., CatalogService],
) -> None:
    catalog = limited(sql_timeout_s=0.5)
    forever = "SELECT count(*) FROM range(1000000000) AS a, range(1000000000) AS b"
    with pytest.raises(QueryLimitError, match=r"more than 0\.2 s"):
        catalog.query_sql(SqlQuery(text=forever, timeout_s=0.2))
    with pytest.raises(QueryLimitError, match=r"more than 0\.5 s"):
        catalog.query_sql(SqlQuery(text=forever, timeout_s=1e9))


def test_more_memory_than_there_is_is_said(limited: Callable[..., CatalogService]) -> None:
    catalog = limited(memory_limit="300MB")
    with pytest.raises(QueryLimitError, match="memory") as caught:
        catalog.query_sql(SqlQuery(text=_RUNAWAYS["list"]))
    assert "memory" == caught.value.details["limit"]


def test_more_disk_than_allowed_is_said(limited: Callable[..., CatalogService]) -> None:
    catalog = limited(memory_limit="300MB", sql_max_disk_bytes=4 * 2**20, sql_max_running=4)
    with pytest.raises(QueryLimitError, match="1 MiB of disk"):
        catalog.query_sql(SqlQuery(text=_RUNAWAYS["sort"]))
    assert [(1,)] == [
        tuple(row.values())
        for row in read_table(catalog.query_sql(SqlQuery(text="SELECT 1"))).to_pylist()
    ]


def test_more_rows_than_allowed_are_refused_unless_fewer_are_wanted(
    limited: Callable[..., CatalogService],
) -> None:
    catalog = limited(sql_max_rows=100)
    exact = read_table(catalog.query_sql(SqlQuery(text="FROM range(100)")))
    wanted = read_table(catalog.query_sql(SqlQuery(text=_ENDLESS, max_num_rows=100)))
    assert (100, 100) == (exact.num_rows, wanted.num_rows)
    for query in (SqlQuery(text="FROM range(101)"), SqlQuery(text=_ENDLESS, max_num_rows=101)):
        with pytest.raises(QueryLimitError, match="more than 100 rows"):
            read_table(catalog.query_sql(query))


def test_a_reader_that_stops_reading_is_cut_off(limited: Callable[..., CatalogService]) -> None:
    """It keeps neither its place nor its cursor longer than the limit of time."""
    catalog = limited(sql_timeout_s=3.0, sql_max_rows=10**12)
    reader = catalog.query_sql(SqlQuery(text=_ENDLESS))
    assert isinstance(reader, pa.RecordBatchReader)
    while catalog.num_readers:
        time.sleep(0.01)
    with pytest.raises(QueryLimitError, match=r"more than 3 s"):
        read_table(reader)
    assert 0 == catalog.sql_statistics().num_running


@pytest.mark.parametrize("num_read", [0, 3])
def test_a_reader_let_go_frees_its_place(
    num_read: int, limited: Callable[..., CatalogService]
) -> None:
    catalog = limited()
    reader = catalog.query_sql(SqlQuery(text=_ENDLESS))
    assert isinstance(reader, pa.RecordBatchReader)
    for _ in range(num_read):
        reader.read_next_batch()
    assert 1 == catalog.sql_statistics().num_running
    del reader
    gc.collect()
    _wait_until_over(catalog)


def test_pieces_no_longer_asked_for_free_its_place(
    limited: Callable[..., CatalogService],
) -> None:
    catalog = limited()
    pieces = write_chunks(catalog.query_sql(SqlQuery(text=_ENDLESS)))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    gc.collect()
    _wait_until_over(catalog)


def test_too_many_at_a_time_wait_their_turn(limited: Callable[..., CatalogService]) -> None:
    catalog = limited(sql_max_running=2)
    readers = [catalog.query_sql(SqlQuery(text=_ENDLESS)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 queries"):
        catalog.query_sql(SqlQuery(text="SELECT 1"))
    del readers[0]
    gc.collect()
    read_table(catalog.query_sql(SqlQuery(text="SELECT 1")))
    assert 3 == catalog.sql_statistics().num_asked


def test_a_refused_question_frees_its_place(limited: Callable[..., CatalogService]) -> None:
    catalog = limited(sql_max_running=1)
    for _ in range(3):
        with pytest.raises(InvalidRequestError):
            catalog.query_sql(SqlQuery(text="DROP TABLE measurement"))
    _wait_until_over(catalog)
