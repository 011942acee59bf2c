"""Rows reach the catalog in batches, each once, whatever the catalog does meanwhile."""

from typing import Any

import pytest
from profiler_fakes import FakeCatalog

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurement import Run, RunKind
from foretoken.profiler.batches import BatchWriter, RowBuilder
from foretoken.profiler.timer import summarize

RUN = Run(run_id="r1", kind=RunKind.PROFILE, tool="test")
CALL = OperatorCall(
    operator="gemm", dtype=DType.BF16, phase=Phase.FORWARD, dims={"m": 1, "n": 2, "k": 3}
)
ROWS = RowBuilder("cpu", "torch", "9.9")


def writer(catalog: FakeCatalog, batch_rows: int = 2, batch_s: float = 100.0) -> BatchWriter:
    return BatchWriter(catalog, RUN, batch_rows=batch_rows, batch_s=batch_s, sleep=lambda _: None)


def measured(latency_us: float) -> Any:
    return ROWS.measured(CALL, "torch.mm", summarize([latency_us]), power_w=7.0)


def medians(catalog: FakeCatalog) -> list[float]:
    return catalog.table.column("latency_us_median").to_pylist()


def test_row_says_what_was_measured_and_on_what() -> None:
    catalog = FakeCatalog()
    batches = writer(catalog)
    batches.add(measured(5.0), now_s=0.0)
    batches.flush(is_last=True)
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
        "latency_us_median": 5.0,
        "num_samples": 1,
        "power_w": 7.0,
        "clock_mhz": None,
        "status": "ok",
        "status_reason": None,
        "flags": [],
    }
    assert expected == {key: row[key] for key in expected}


def test_failed_case_is_a_row_with_a_reason_and_no_times() -> None:
    catalog = FakeCatalog()
    batches = writer(catalog)
    batches.add(ROWS.failed(CALL, "torch.mm", "out of memory " * 100), now_s=0.0)
    batches.flush()
    (row,) = catalog.table.to_pylist()
    assert (row["status"], row["latency_us_median"]) == ("failed", None)
    assert row["status_reason"].startswith("out of memory")
    assert len(row["status_reason"]) == 300


def test_batch_goes_out_when_it_is_full() -> None:
    catalog = FakeCatalog()
    batches = writer(catalog, batch_rows=2)
    for latency_us in (1.0, 2.0, 3.0):
        batches.add(measured(latency_us), now_s=0.0)
    assert medians(catalog) == [1.0, 2.0]
    batches.flush(is_last=True)
    assert medians(catalog) == [1.0, 2.0, 3.0]
    assert list(catalog.batches) == [("r1", 0), ("r1", 1)]
    assert catalog.completed == {"r1"}


def test_batch_goes_out_when_its_first_row_is_old() -> None:
    catalog = FakeCatalog()
    batches = writer(catalog, batch_rows=100, batch_s=5.0)
    for now_s in (10.0, 14.0, 15.0, 16.0):
        batches.add(measured(now_s), now_s=now_s)
    assert medians(catalog) == [10.0, 14.0, 15.0]


def test_run_without_a_rest_is_completed_all_the_same() -> None:
    catalog = FakeCatalog()
    batches = writer(catalog, batch_rows=1)
    batches.add(measured(1.0), now_s=0.0)
    batches.flush(is_last=True)
    assert (medians(catalog), catalog.completed) == ([1.0], {"r1"})


def test_batch_is_sent_again_when_the_catalog_was_away() -> None:
    catalog = FakeCatalog()
    catalog.errors = [ServiceUnavailableError("restarting")] * 3
    batches = writer(catalog, batch_rows=1)
    batches.add(measured(1.0), now_s=0.0)
    assert medians(catalog) == [1.0]


def test_catalog_that_stays_away_ends_the_run() -> None:
    catalog = FakeCatalog()
    catalog.errors = [ServiceUnavailableError("gone")] * 4
    with pytest.raises(ServiceUnavailableError):
        writer(catalog, batch_rows=1).add(measured(1.0), now_s=0.0)
