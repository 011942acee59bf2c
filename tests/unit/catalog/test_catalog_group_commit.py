"""Batches that are stored together: who waits for whom, who sees which error, what is counted."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.recording.batch_writer import BatchWriter, Memory, Outcome
from foretoken.catalog.recording.ingest import GroupCommit, IngestStatistics
from foretoken.catalog.recording.intake import (
    GROUP_BATCHES,
    GROUP_ROWS,
    Arrival,
    CheckedGroup,
    GroupReader,
    check_arrivals,
)
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import (
    CatalogBusyError,
    ForetokenError,
    InvalidRequestError,
    RunConflictError,
    StorageFullError,
    UnknownDeviceError,
)
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind

_NOW = datetime(2026, 1, 2, tzinfo=UTC)
_IMPORT = run("import", RunKind.IMPORT)


class _Source:
    """Batches that count how many of them were asked for."""

    def __init__(self, num_batches: int, num_rows: int = 1, **changes: Any) -> None:
        rows = gemms(range(1, num_rows + 1))
        self.num_asked = 0
        self._batches = [
            MeasurementBatch(batch_index=index, rows=rows, **changes)
            for index in range(num_batches)
        ]

    def __iter__(self) -> Iterator[MeasurementBatch]:
        for batch in self._batches:
            self.num_asked += 1
            yield batch


def _num_asked_at_each_receipt(catalog: CatalogService, source: _Source, kind: RunKind) -> set[int]:
    return {source.num_asked for _ in catalog.record(run("asked", kind), source)}


def test_no_more_than_a_group_of_an_import_is_read_ahead(catalog: CatalogService) -> None:
    source = _Source(GROUP_BATCHES + 5)
    found = _num_asked_at_each_receipt(catalog, source, RunKind.IMPORT)
    assert {GROUP_BATCHES, GROUP_BATCHES + 5} == found


def test_a_group_is_full_with_so_many_rows() -> None:
    source = _Source(4, GROUP_ROWS // 2)
    sizes = [len(group) for group in GroupReader(_IMPORT, source)]
    assert [2, 2] == sizes


def test_a_sender_that_waits_for_a_receipt_gets_it(catalog: CatalogService) -> None:
    """Without that it would wait for the catalog, which waits for more of the group."""
    source = _Source(3, wants_receipt=True)
    assert {1, 2, 3} == _num_asked_at_each_receipt(catalog, source, RunKind.IMPORT)


def test_receipts_of_a_group_come_in_order_with_the_counts_of_their_batches(
    catalog: CatalogService,
) -> None:
    nan = row(8, latency_us_median=float("nan"))
    tables = (table(row(4096, latency_us_median=2.0), row(1)), gemms([]), table(nan), gemms([1, 2]))
    receipts = list(catalog.record(_IMPORT, batches(*tables)))
    found = [(r.batch_index, r.num_rows, r.num_flagged) for r in receipts]
    assert [(0, 2, 1), (1, 0, 0), (2, 1, 0), (3, 2, 0)] == found
    summary = catalog.list_runs()[0]
    assert (5, 1, 1) == (summary.num_rows, summary.num_flagged, summary.num_failed)


def test_what_comes_before_a_bad_batch_of_a_group_is_stored(catalog: CatalogService) -> None:
    bad = table(row(1), row(2, dims={"m": 1}))
    recording = catalog.record(_IMPORT, batches(gemms([1]), gemms([2]), bad, gemms([3])))
    assert [0, 1] == [next(recording).batch_index, next(recording).batch_index]
    with pytest.raises(InvalidRequestError, match="batch 2: row 1: gemm: n: missing"):
        next(recording)
    assert 2 == catalog.list_runs()[0].num_rows


def test_a_resumed_import_tells_what_was_there_from_what_is_new(catalog: CatalogService) -> None:
    whole = batches(*(gemms([m]) for m in range(1, 8)))
    list(catalog.record(_IMPORT, [whole[5], whole[0], whole[2]]))
    receipts = list(catalog.record(_IMPORT, whole))
    assert [True, False, True, False, False, True, False] == [r.was_duplicate for r in receipts]
    assert 7 == catalog.list_runs()[0].num_rows


def test_a_batch_twice_in_one_group_is_stored_once(catalog: CatalogService) -> None:
    once = batches(gemms([1, 2]), is_complete=False)
    receipts = list(catalog.record(_IMPORT, once * 2))
    assert [False, True] == [receipt.was_duplicate for receipt in receipts]
    assert 2 == catalog.list_runs()[0].num_rows


@pytest.mark.parametrize("name", ["num_samples", "dims", "latency_us_median"])
def test_a_column_of_another_type_is_named(name: str, catalog: CatalogService) -> None:
    rows = gemms([1])
    position = rows.schema.get_field_index(name)
    with pytest.raises(InvalidRequestError, match=f"batch 0: {name}: expected"):
        list(catalog.record(run(), batches(rows.set_column(position, name, pa.array(["x"])))))


def test_text_that_is_no_text_is_refused(catalog: CatalogService) -> None:
    with pytest.raises(InvalidRequestError, match="batch 0: rows: not sound Arrow data"):
        list(catalog.record(run(), batches(_with_torn_text(gemms([1])))))


def _with_torn_text(rows: pa.Table) -> pa.Table:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    position = rows.schema.get_field_index("kernel")
    return rows.set_column(position, "kernel", pa.Array.from_buffers(pa.string(), 1, buffers))


@pytest.fixture
def store(catalog_path: str) -> Iterator[Store]:
    store = Store(CatalogConfig(path=catalog_path, num_threads=1))
    store.open()
    yield store
    store.close()


def _group(rows: pa.Table) -> CheckedGroup:
    batch = MeasurementBatch(batch_index=0, rows=rows, is_last=True)
    group, error = check_arrivals([Arrival(batch, rows)], 100)
    assert group is not None, error
    return group


def _commit_together(store: Store, *groups: tuple[Run, CheckedGroup]) -> list[Outcome]:
    """Let threads queue their groups while a transaction keeps the store, then let them go."""
    commits = GroupCommit(store, lambda: _NOW)
    with ThreadPoolExecutor(len(groups)) as pool:
        with store.transaction():
            work = [pool.submit(commits.commit, *group) for group in groups]
            while len(commits._queue) < len(groups) - 1:  # the first leads, and waits for the store
                time.sleep(0.001)
        return [future.result() for future in work]


def test_streams_that_wait_together_are_stored_in_one_transaction(store: Store) -> None:
    num_writes = store.num_writes
    outcomes = _commit_together(
        store, *((run(f"run-{number}"), _group(gemms([1]))) for number in range(5))
    )
    assert [1] * 5 == [len(outcome.receipts) for outcome in outcomes]
    # The one that kept the store, the first in the queue, and all the others together.
    assert num_writes + 3 == store.num_writes


def test_a_conflict_is_seen_by_its_own_stream_only(store: Store) -> None:
    group = _group(gemms([1]))
    outcomes = _commit_together(
        store,
        (run("a"), group),
        (run("b", content_hash="one"), group),
        (run("b", content_hash="other"), group),
        (run("c"), group),
    )
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert [RunConflictError] == [type(error) for error in errors]
    assert 3 == sum(len(outcome.receipts) for outcome in outcomes)


def test_what_the_database_refuses_is_seen_by_its_own_stream_only(store: Store) -> None:
    """DuckDB refuses text that is no UTF-8, and with it the whole transaction."""
    group = _group(gemms([1]))
    torn = _with_torn_text(group.rows)
    good = ((run(f"run-{number}"), group) for number in range(3))
    outcomes = _commit_together(store, *good, (run("z"), replace(group, rows=torn)))
    assert [1, 1, 1, 0] == [len(outcome.receipts) for outcome in outcomes]
    assert [False, False, False, True] == [outcome.error is not None for outcome in outcomes]


def test_what_fails_unforeseen_is_seen_by_its_own_stream_and_not_tried_for_ever(
    store: Store,
) -> None:
    """Arrow cannot join its rows to the others'; nobody after it must stumble over them."""
    group = _group(gemms([1]))
    good = ((run(f"run-{number}"), group) for number in range(3))
    place = group.rows.schema.get_field_index("num_samples")
    odd = replace(group, rows=group.rows.set_column(place, "num_samples", pa.array(["many"])))
    outcomes = _commit_together(store, *good, (run("z"), odd), (run("y"), group))
    assert [1, 1, 1, 0, 1] == [len(outcome.receipts) for outcome in outcomes]
    assert outcomes[3].error is not None


class _ContestedStore(Store):
    """A store that refuses so many transactions with an error before it takes one."""

    def __init__(self, path: str, error: Exception, num_refusals: int) -> None:
        super().__init__(CatalogConfig(path=path, num_threads=1))
        self.num_asked = 0
        self._error = error
        self._num_refusals = num_refusals

    @contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        self.num_asked += 1
        if self.num_asked <= self._num_refusals:
            raise self._error
        with super().transaction() as cursor:
            yield cursor


@pytest.mark.parametrize(
    ("error", "num_refusals", "num_tries", "is_stored"),
    [
        (CatalogBusyError("another writer"), 0, 1, True),
        (CatalogBusyError("another writer"), 1, 2, True),
        (CatalogBusyError("another writer"), 2, 2, False),
        (StorageFullError("no room"), 1, 1, False),
    ],
    ids=["free", "busy once", "busy", "full"],
)
def test_a_group_that_another_writer_was_quicker_than_is_tried_once_more(
    error: ForetokenError, num_refusals: int, num_tries: int, is_stored: bool, catalog_path: str
) -> None:
    """Once, and only then; after that its sender gets the error."""
    store = _ContestedStore(catalog_path, error, 0)
    store.open()
    store.num_asked, store._num_refusals = 0, num_refusals
    outcome = GroupCommit(store, lambda: _NOW).commit(run(), _group(gemms([1])))
    store.close()
    assert (num_tries, is_stored) == (store.num_asked, outcome.receipts != [])
    assert (None if is_stored else type(error)) == (outcome.error and type(outcome.error))


def test_the_writer_forgets_what_it_knew_when_others_write(store: Store) -> None:
    """A run that was deleted behind its back is recorded anew, not taken for stored."""
    commits = GroupCommit(store, lambda: _NOW)
    group = _group(gemms([1]))
    receipts = [commits.commit(run(), group).receipts[0] for _ in range(2)]
    assert [False, True] == [receipt.was_duplicate for receipt in receipts]
    with store.transaction() as cursor:
        cursor.execute("DELETE FROM measurement; DELETE FROM batch; DELETE FROM run")
    assert not commits.commit(run(), group).receipts[0].was_duplicate


def test_an_interrupted_transaction_leaves_nothing(store: Store) -> None:
    def write_and_fail() -> None:
        with store.transaction() as cursor:
            writer = BatchWriter(cursor, Memory(), _NOW)
            writer.add(run(), _group(gemms([1])))
            writer.flush()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_and_fail()
    with store.cursor() as cursor:
        counts = cursor.execute(
            "SELECT (SELECT count(*) FROM run), (SELECT count(*) FROM measurement)"
        ).fetchall()
    assert [(0, 0)] == counts


def test_what_is_recorded_is_counted(catalog: CatalogService) -> None:
    whole = batches(gemms([1, 2]), gemms([3]))
    list(catalog.record(_IMPORT, whole))
    list(catalog.record(_IMPORT, whole))
    for bad in (gemms([1]).drop_columns(["device"]), table(row(device="a3000"))):
        with pytest.raises((InvalidRequestError, UnknownDeviceError)):
            list(catalog.record(run("bad"), batches(bad)))
    found = catalog.statistics()
    expected = IngestStatistics(
        num_rows=3,
        num_bytes=sum(batch.rows.nbytes for batch in whole),  # type: ignore[attr-defined]
        num_batches=2,
        num_duplicates=2,
        ingest_s=found.ingest_s,
        rejects={"INVALID_REQUEST": 1, "UNKNOWN_DEVICE": 1},
    )
    assert expected == found
    assert found.ingest_s > 0
