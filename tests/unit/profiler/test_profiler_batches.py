"""Rows reach the catalog in batches, each once, whatever the catalog does meanwhile."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiler_fakes import HASTY, FakeCatalog, spooled_rows

from foretoken.domain.errors import (
    InvalidRequestError,
    RunConflictError,
    ServiceUnavailableError,
)
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.measurement import Run, RunKind
from foretoken.profiler.recording.batch_sender import HandOver, send_left_run, wait_for_catalog
from foretoken.profiler.recording.batches import BatchWriter, RowBuilder, open_writer
from foretoken.profiler.recording.spool import find_left_runs
from foretoken.profiler.timing.timer import summarize

RUN = Run(run_id="r1", kind=RunKind.PROFILE, tool="test")
CALL = OperatorCall(
    operator="gemm", dtype=DType.BF16, phase=Phase.FORWARD, dims={"m": 1, "n": 2, "k": 3}
)
ROWS = RowBuilder("cpu", "torch", "9.9")


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


def hand_over(batch_rows: int = 2, batch_s: float = 100.0) -> HandOver:
    return replace(HASTY, batch_rows=batch_rows, batch_s=batch_s)


@pytest.fixture
def writer(catalog: FakeCatalog, tmp_path: Path) -> Iterator[BatchWriter]:
    with open_writer(catalog, RUN, tmp_path, hand_over()) as opened:
        yield opened


def measured(latency_us: float) -> Any:
    return ROWS.measured(CALL, "torch.mm", summarize([latency_us]), power_w=7.0)


def take(writer: BatchWriter, latency_us: float, now_s: float = 0.0) -> None:
    writer.add(measured(latency_us), now_s)
    writer.confirm(now_s)


def finish(writer: BatchWriter) -> None:
    writer.finish(lambda _: None)


def medians(catalog: FakeCatalog) -> list[float]:
    found: list[float] = catalog.table.column("latency_us_median").to_pylist()
    return found


def test_row_says_what_was_measured_and_on_what(catalog: FakeCatalog, writer: BatchWriter) -> None:
    writer.add(measured(5.0), now_s=0.0)
    finish(writer)
    (row,) = catalog.table.to_pylist()
    expected = {
        "operator": "gemm",
        "phase": "forward",
        "dtype": "bf16",
        "dims": [("m", 1), ("n", 2), ("k", 3)],
        "device": "cpu",
        "framework": "torch",
        "framework_version": "9.9",
        "kernel": "torch.mm",
        "variant": None,
        "latency_us_median": 5.0,
        "num_samples": 1,
        "power_w": 7.0,
        "clock_mhz": None,
        "status": "ok",
        "status_reason": None,
        "flags": [],
    }
    assert expected == {key: row[key] for key in expected}


def test_row_of_a_special_case_names_it(catalog: FakeCatalog, writer: BatchWriter) -> None:
    call = replace(CALL, variant="cache=warm")
    writer.add(ROWS.measured(call, "torch.mm", summarize([5.0])), now_s=0.0)
    finish(writer)
    assert ["cache=warm"] == catalog.table.column("variant").to_pylist()


def test_failed_case_is_a_row_with_a_reason_and_no_times(
    catalog: FakeCatalog, writer: BatchWriter
) -> None:
    writer.add(ROWS.failed(CALL, "torch.mm", "out of memory " * 100), now_s=0.0)
    writer.flush()
    (row,) = catalog.table.to_pylist()
    assert (row["status"], row["latency_us_median"]) == ("failed", None)
    assert row["status_reason"].startswith("out of memory")
    assert len(row["status_reason"]) == 300


def test_batch_goes_out_when_it_is_full(catalog: FakeCatalog, writer: BatchWriter) -> None:
    for latency_us in (1.0, 2.0, 3.0):
        take(writer, latency_us)
    assert medians(catalog) == [1.0, 2.0]
    finish(writer)
    assert medians(catalog) == [1.0, 2.0, 3.0]
    assert list(catalog.batches) == [("r1", 0), ("r1", 1)]
    assert catalog.completed == {"r1"}


def test_batch_goes_out_when_its_first_row_is_old(catalog: FakeCatalog, tmp_path: Path) -> None:
    with open_writer(catalog, RUN, tmp_path, hand_over(batch_rows=100, batch_s=5.0)) as writer:
        for now_s in (10.0, 14.0, 15.0, 16.0):
            take(writer, now_s, now_s)
        assert medians(catalog) == [10.0, 14.0, 15.0]


def test_unconfirmed_rows_wait(catalog: FakeCatalog, writer: BatchWriter) -> None:
    for latency_us in (1.0, 2.0, 3.0):
        writer.add(measured(latency_us), now_s=0.0)
    assert medians(catalog) == []


def test_doubts_are_on_all_rows_timed_since_the_last_time(
    catalog: FakeCatalog, writer: BatchWriter
) -> None:
    writer.add(measured(1.0), now_s=0.0)
    writer.confirm(0.0)
    writer.flush()
    writer.add(measured(2.0), now_s=0.0)
    writer.add(ROWS.failed(CALL, "torch.mm", "no"), now_s=0.0)
    writer.confirm(0.0, ["drift: 5 %"])
    finish(writer)
    assert catalog.table.column("flags").to_pylist() == [[], ["drift: 5 %"], []]


def test_run_without_a_rest_is_completed_all_the_same(catalog: FakeCatalog, tmp_path: Path) -> None:
    with open_writer(catalog, RUN, tmp_path, hand_over(batch_rows=1)) as writer:
        take(writer, 1.0)
        finish(writer)
    assert (medians(catalog), catalog.completed) == ([1.0], {"r1"})
    assert list(tmp_path.iterdir()) == []


def test_batch_is_sent_again_when_the_catalog_was_away(
    catalog: FakeCatalog, writer: BatchWriter
) -> None:
    catalog.errors = [ServiceUnavailableError("restarting")] * 3
    take(writer, 1.0)
    take(writer, 2.0)
    finish(writer)
    assert medians(catalog) == [1.0, 2.0]


def test_measuring_goes_on_while_the_catalog_is_away(catalog: FakeCatalog, tmp_path: Path) -> None:
    """What it has not is on disk; the next process hands it over, and nothing is there twice."""
    catalog.errors = [ServiceUnavailableError("gone")] * 100_000
    limits = replace(hand_over(batch_rows=1), receipt_s=0.01, catalog_s=0.1)
    with open_writer(catalog, RUN, tmp_path, limits) as writer:
        for latency_us in (1.0, 2.0, 3.0):
            take(writer, latency_us)
        assert writer.num_waiting_rows == 3
        assert spooled_rows(tmp_path) == 3
        with pytest.raises(ServiceUnavailableError, match="3 rows are kept in"):
            finish(writer)
    assert medians(catalog) == []
    catalog.errors = []
    (left,) = find_left_runs(tmp_path)
    assert send_left_run(catalog, left) == 3
    assert (medians(catalog), catalog.completed) == ([1.0, 2.0, 3.0], {"r1"})
    assert list(find_left_runs(tmp_path)) == []


def test_refusal_of_a_batch_ends_the_run(catalog: FakeCatalog, tmp_path: Path) -> None:
    catalog.errors = [InvalidRequestError("bad row")]
    with open_writer(catalog, RUN, tmp_path, hand_over(batch_rows=1)) as writer:
        with pytest.raises(InvalidRequestError, match="bad row"):
            take(writer, 1.0)
        assert spooled_rows(tmp_path) == 1


def test_run_that_ended_with_its_last_receipt_is_forgotten(
    catalog: FakeCatalog, tmp_path: Path
) -> None:
    """The process ended after the catalog had everything and before it cleaned up."""
    with open_writer(catalog, RUN, tmp_path, hand_over()) as writer:
        take(writer, 1.0)
    catalog.errors = [RunConflictError("batch 1 is too late")]
    (left,) = find_left_runs(tmp_path)
    with pytest.raises(RunConflictError):
        send_left_run(catalog, left)  # rows the catalog may not have are not thrown away
    (left,) = find_left_runs(tmp_path)
    assert send_left_run(catalog, left) == 1


def test_catalog_is_waited_for_and_the_reason_told() -> None:
    answers: list[Exception | None] = [ServiceUnavailableError("starting"), None]
    told: list[str] = []

    def ask() -> int:
        error = answers.pop(0)
        if error is not None:
            raise error
        return 7

    assert wait_for_catalog(ask, HASTY, told.append) == 7
    assert told == ["waiting for the catalog: starting"]


def test_catalog_that_stays_away_is_an_error_in_the_end() -> None:
    def ask() -> int:
        raise ServiceUnavailableError("gone")

    with pytest.raises(ServiceUnavailableError, match="gone"):
        wait_for_catalog(ask, replace(HASTY, catalog_s=0.01), lambda _: None)
