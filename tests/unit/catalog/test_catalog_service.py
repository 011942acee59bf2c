"""Recording: receipts, retries, conflicts, and what readers see meanwhile."""

import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from catalog_rows import batches, gemms, row, run, table

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    InvalidRequestError,
    RunConflictError,
    UnknownDeviceError,
    UnknownOperatorError,
)
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
)
from foretoken.wire.arrow import STORED_SCHEMA, read_table

_ALL = MeasurementFilter(include_failed=True, include_flagged=True)


def _count(catalog: CatalogService, selection: MeasurementFilter = _ALL) -> int:
    return read_table(catalog.read_measurements(selection)).num_rows


def test_rows_are_kept_under_the_devices_own_name(catalog: CatalogService) -> None:
    rows = table(row(1, device="NVIDIA A30"), row(2, device="h200"), row(3))
    list(catalog.record(run(), batches(rows)))
    kept = read_table(catalog.read_measurements(MeasurementFilter(run_id="run-1")))
    assert ["a30", "a30", "h200_sxm"] == sorted(kept.column("device").to_pylist())
    assert _count(catalog, MeasurementFilter(device="H200")) == 1


def test_every_batch_has_a_receipt(catalog: CatalogService) -> None:
    receipts = list(catalog.record(run(), batches(gemms([1, 2]), gemms([3]))))
    expected = [
        BatchReceipt(run_id="run-1", batch_index=0, num_rows=2),
        BatchReceipt(run_id="run-1", batch_index=1, num_rows=1),
    ]
    assert expected == receipts


@pytest.mark.parametrize("run_id", ["", "../run", "/abs/run", "run 1", ".run", "r" * 129, "r\0"])
def test_a_run_keeps_to_the_alphabet_of_names(catalog: CatalogService, run_id: str) -> None:
    """Who fetches the run elsewhere may make a file of it."""
    with pytest.raises(InvalidRequestError, match=r"run_id: .* is no name"):
        list(catalog.record(replace(run(), run_id=run_id), batches(gemms([1]))))
    assert () == catalog.list_runs()


def test_a_batch_is_stored_before_the_next_is_asked_for(catalog: CatalogService) -> None:
    recording = catalog.record(run(), batches(gemms([1]), gemms([2]), gemms([3])))
    counts = [_count(catalog) for _ in recording]
    assert [1, 2, 3] == counts


def test_rows_come_back_as_they_were(catalog: CatalogService) -> None:
    full = row(
        topology=None,
        kernel="cutlass",
        latency_us_mean=105.0,
        latency_us_p90=107.5,
        num_samples=12,
        power_w=150.5,
        clock_mhz=1440.0,
        source_file="a.csv",
        source_hash="abc",
        source_row=7,
    )
    list(catalog.record(run(), batches(table(full, row(8)))))
    found = read_table(catalog.read_measurements(_ALL))
    assert STORED_SCHEMA == found.schema
    place = {
        "run_id": "run-1",
        "batch_index": 0,
        "row_index": 0,
        "recorded_at": datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 - the schema says UTC
    }
    expected = {**place, **table(full).to_pylist()[0]}
    assert expected == found.to_pylist()[0]


def test_a_stored_batch_is_acknowledged_and_not_stored_again(catalog: CatalogService) -> None:
    first = list(catalog.record(run(), batches(gemms([1, 2]))))
    again = list(catalog.record(run(), batches(gemms([1, 2]))))
    assert [False, True] == [receipts[0].was_duplicate for receipts in (first, again)]
    assert (2, 2) == (again[0].num_rows, _count(catalog))


def test_a_run_of_other_content_is_a_conflict(catalog: CatalogService) -> None:
    list(catalog.record(run(content_hash="a"), batches(gemms([1]))))
    with pytest.raises(RunConflictError, match="run-1"):
        list(catalog.record(run(content_hash="b"), batches(gemms([1]))))


def test_a_batch_after_the_last_is_a_conflict(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms([1]))))
    late = MeasurementBatch(batch_index=1, rows=gemms([2]))
    with pytest.raises(RunConflictError, match="ended with batch 0"):
        list(catalog.record(run(), [late]))


def test_a_batch_before_others_that_are_there_is_not_the_last(catalog: CatalogService) -> None:
    """Else the run could never be complete."""
    whole = batches(gemms([1]), gemms([2]), gemms([3]), is_complete=False)
    list(catalog.record(run(), [whole[0], whole[2]]))
    with pytest.raises(RunConflictError, match="batch 1 cannot be its last"):
        list(catalog.record(run(), [replace(whole[1], is_last=True)]))
    assert 2 == catalog.list_runs()[0].num_rows


def test_a_profile_is_seen_as_it_grows(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms([1]), is_complete=False)))
    assert 1 == _count(catalog)


def test_an_import_is_seen_as_a_whole(catalog: CatalogService) -> None:
    whole = batches(gemms([1]), gemms([2]))
    imported = run(kind=RunKind.IMPORT)
    list(catalog.record(imported, whole[:1]))
    assert (0, ()) == (_count(catalog), catalog.describe_coverage())
    list(catalog.record(imported, whole))
    assert 2 == _count(catalog)


def test_an_import_that_lacks_a_batch_is_not_complete(catalog: CatalogService) -> None:
    whole = batches(gemms([1]), gemms([2]), gemms([3]))
    imported = run(kind=RunKind.IMPORT)
    list(catalog.record(imported, [whole[2], whole[0]]))
    assert 0 == _count(catalog)
    list(catalog.record(imported, [whole[1]]))
    assert 3 == _count(catalog)


def test_a_bad_batch_leaves_those_before_it_and_nothing_of_itself(catalog: CatalogService) -> None:
    bad = table(row(1), row(2, dims={"m": 1}))
    recording = catalog.record(run(), batches(gemms([1]), bad))
    assert 0 == next(recording).batch_index
    with pytest.raises(InvalidRequestError, match="batch 1: row 1: gemm: n: missing"):
        next(recording)
    assert 1 == _count(catalog)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"operator": "gemmm"}, UnknownOperatorError),
        ({"device": "a3000"}, UnknownDeviceError),
        ({"status": "maybe"}, InvalidRequestError),
    ],
)
def test_a_row_that_is_no_measurement_is_refused(
    changes: dict[str, Any], error: type[Exception], catalog: CatalogService
) -> None:
    with pytest.raises(error):
        list(catalog.record(run(), batches(table(row(**changes)))))
    assert () == catalog.list_runs()


def test_another_schema_is_refused(catalog: CatalogService) -> None:
    with pytest.raises(InvalidRequestError, match="missing columns \\['device'\\]"):
        list(catalog.record(run(), batches(gemms([1]).drop_columns(["device"]))))


def test_a_batch_over_the_limit_is_refused(tmp_path: Path) -> None:
    small = CatalogService(CatalogConfig(path=str(tmp_path / "small.duckdb"), max_batch_rows=2))
    small.open()
    with pytest.raises(InvalidRequestError, match="3 are more than 2"):
        list(small.record(run(), batches(gemms([1, 2, 3]))))
    small.close()


def test_flagged_and_failed_rows_are_counted_and_left_out(catalog: CatalogService) -> None:
    rows = table(row(4096, latency_us_median=2.0), row(8, latency_us_median=float("nan")), row(16))
    receipt = next(iter(catalog.record(run(), batches(rows))))
    assert 1 == receipt.num_flagged
    counts = [
        _count(catalog, MeasurementFilter(include_failed=failed, include_flagged=flagged))
        for failed in (False, True)
        for flagged in (False, True)
    ]
    assert [1, 2, 2, 3] == counts


def test_a_batch_without_rows_can_complete_a_run(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms([1]), gemms([]))))
    assert "" != catalog.list_runs()[0].completed_at


def test_runs_are_listed_newest_first_with_their_counts(catalog: CatalogService) -> None:
    older = Run(
        run_id="older",
        kind=RunKind.IMPORT,
        tool="vidur",
        content_hash="abc",
        source="a paper",
        licence="MIT",
        environment={"gpu": "A30", "cuda": "12.8"},
    )
    nan = row(8, latency_us_median=float("nan"))
    list(catalog.record(older, batches(table(row(4096, latency_us_median=2.0), nan))))
    list(catalog.record(run("newer"), batches(gemms([1, 2]), is_complete=False)))
    expected = (
        RunSummary(run=run("newer"), started_at="2026-01-02T03:06:05Z", num_rows=2),
        RunSummary(
            run=older,
            started_at="2026-01-02T03:04:05Z",
            completed_at="2026-01-02T03:04:05Z",
            num_rows=2,
            num_flagged=1,
            num_failed=1,
        ),
    )
    assert expected == catalog.list_runs()


def test_threads_may_record_and_read_at_once(catalog: CatalogService) -> None:
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for receipt in catalog.record(run(name), batches(*[gemms([m]) for m in range(1, 6)])):
                assert _count(catalog, MeasurementFilter(run_id=name)) == receipt.batch_index + 1
        except BaseException as err:  # noqa: BLE001 - shown by the assertion below
            errors.append(err)

    threads = [threading.Thread(target=work, args=(f"run-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert 20 == _count(catalog)


def test_threads_that_retry_the_same_batch_store_it_once(catalog: CatalogService) -> None:
    receipts: list[BatchReceipt] = []

    def work() -> None:
        receipts.extend(catalog.record(run(), batches(gemms(range(1, 500)))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [False, True, True, True] == sorted(receipt.was_duplicate for receipt in receipts)
    assert 499 == _count(catalog)


def test_a_reader_sees_the_catalog_as_it_was_when_it_asked(catalog: CatalogService) -> None:
    list(catalog.record(run(), batches(gemms(range(1, 5000)), is_complete=False)))
    stream = catalog.read_measurements(_ALL)
    more = MeasurementBatch(batch_index=1, rows=gemms([1]), is_last=True)
    list(catalog.record(run(), [more]))
    assert (4999, 5000) == (read_table(stream).num_rows, _count(catalog))
