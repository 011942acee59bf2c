"""The catalog behaves alike whether it is embedded or remote."""

from collections.abc import Iterator

import pyarrow as pa
import pytest
from contract_reach import Reach
from contract_rows import make_batches, make_rows, make_run

from foretoken.catalog import servicer
from foretoken.catalog.service import CatalogService
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import (
    InvalidRequestError,
    RunConflictError,
    UnknownDeviceError,
    UnknownOperatorError,
)
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    RunKind,
)
from foretoken.domain.ports import CatalogPort
from foretoken.wire.arrow import STORED_SCHEMA


@pytest.fixture
def port(catalog: CatalogService, reach: Reach) -> CatalogPort:
    port: CatalogPort = reach(catalog, servicer.register, CatalogClient.connect)
    return port


def _read(port: CatalogPort, selection: MeasurementFilter | None = None) -> pa.Table:
    return pa.table(port.read_measurements(selection or MeasurementFilter()))


def _receipts(num_batches: int, *, was_duplicate: bool = False) -> list[BatchReceipt]:
    return [
        BatchReceipt(run_id="run-1", batch_index=index, num_rows=4, was_duplicate=was_duplicate)
        for index in range(num_batches)
    ]


def test_every_batch_gets_a_receipt(port: CatalogPort) -> None:
    assert list(port.record(make_run(), make_batches(3))) == _receipts(3)


def test_a_batch_of_a_profile_is_asked_for_after_the_receipt_of_the_one_before(
    port: CatalogPort,
) -> None:
    """A sender that measures between batches sees its progress, wherever the catalog is."""
    events = []

    def send() -> Iterator[MeasurementBatch]:
        for batch in make_batches(3):
            events.append(f"batch {batch.batch_index}")
            yield batch

    receipts = port.record(make_run(kind=RunKind.PROFILE), send())
    events.extend(f"receipt {receipt.batch_index}" for receipt in receipts)
    assert events == ["batch 0", "receipt 0", "batch 1", "receipt 1", "batch 2", "receipt 2"]


@pytest.mark.parametrize(
    "num_batches",
    [1, 64, 65, *(pytest.param(number, marks=pytest.mark.slow) for number in (63, 130))],
)
def test_an_import_of_any_number_of_batches_is_stored_whole(
    num_batches: int, port: CatalogPort
) -> None:
    """Its batches may travel and be stored in groups; none waits for a group to fill."""
    assert list(port.record(make_run(), make_batches(num_batches))) == _receipts(num_batches)
    assert _read(port).num_rows == 4 * num_batches


def test_an_import_that_does_not_say_which_batch_is_last_stays_open(port: CatalogPort) -> None:
    """Every batch still gets its receipt."""
    assert list(port.record(make_run(), make_batches(3)[:2])) == _receipts(2)
    assert [summary.completed_at for summary in port.list_runs()] == [""]


def test_recording_again_stores_nothing_twice(port: CatalogPort) -> None:
    list(port.record(make_run(), make_batches(3)))
    again = list(port.record(make_run(), make_batches(3)))
    assert again == _receipts(3, was_duplicate=True)
    assert _read(port).num_rows == 12


def test_an_interrupted_run_is_taken_up_again(port: CatalogPort) -> None:
    list(port.record(make_run(), make_batches(3)[:2]))
    again = list(port.record(make_run(), make_batches(3)))
    assert [receipt.was_duplicate for receipt in again] == [True, True, False]
    assert _read(port).num_rows == 12


def test_rows_of_an_import_are_hidden_until_it_is_complete(port: CatalogPort) -> None:
    list(port.record(make_run(), make_batches(3)[:2]))
    assert _read(port).num_rows == 0
    list(port.record(make_run(), make_batches(3)[2:]))
    assert _read(port).num_rows == 12


def test_rows_of_a_profile_are_visible_at_once(port: CatalogPort) -> None:
    list(port.record(make_run(kind=RunKind.PROFILE), make_batches(3)[:1]))
    assert _read(port).num_rows == 4


def test_the_same_run_with_other_content_is_a_conflict(port: CatalogPort) -> None:
    list(port.record(make_run(content_hash="abc"), make_batches(1)))
    with pytest.raises(RunConflictError):
        list(port.record(make_run(content_hash="xyz"), make_batches(1)))
    assert _read(port).num_rows == 4


def test_an_error_of_the_sender_reaches_the_sender(port: CatalogPort) -> None:
    """What was acknowledged before stays, and the run stays open."""

    def send() -> Iterator[MeasurementBatch]:
        yield make_batches(3)[0]
        raise OSError("the source file ended early")

    receipts = []

    def record() -> None:
        receipts.extend(port.record(make_run(kind=RunKind.PROFILE), send()))

    with pytest.raises(OSError, match="the source file ended early"):
        record()
    assert receipts == _receipts(1)
    assert [summary.completed_at for summary in port.list_runs()] == [""]
    again = list(port.record(make_run(kind=RunKind.PROFILE), make_batches(3)))
    assert again[-1] == _receipts(3)[-1]


def test_rows_of_another_schema_are_refused(port: CatalogPort) -> None:
    rows = make_rows([1]).drop_columns(["dtype"])
    batch = MeasurementBatch(batch_index=0, rows=rows, is_last=True)
    with pytest.raises(InvalidRequestError, match="dtype"):
        list(port.record(make_run(), [batch]))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"operator": "gem"}, UnknownOperatorError),
        ({"device": "a31"}, UnknownDeviceError),
        ({"dims": {"m": 1}}, InvalidRequestError),
    ],
    ids=["operator", "device", "dims"],
)
def test_a_row_that_names_nothing_known_is_refused(
    changes: dict[str, object], error: type[Exception], port: CatalogPort
) -> None:
    batch = MeasurementBatch(batch_index=0, rows=make_rows([1], **changes), is_last=True)
    with pytest.raises(error):
        list(port.record(make_run(), [batch]))
    assert _read(port).num_rows == 0


def test_rows_come_back_as_they_were_sent(port: CatalogPort) -> None:
    list(port.record(make_run(), make_batches(2)))
    rows = _read(port)
    assert rows.schema.names == STORED_SCHEMA.names
    assert rows.column("run_id").unique().to_pylist() == ["run-1"]
    assert rows.column("batch_index").to_pylist() == [0] * 4 + [1] * 4
    sent = make_rows(range(1, 9))
    assert rows.select(["dims", "latency_us_median"]) == sent.select(["dims", "latency_us_median"])


def test_a_filter_selects(port: CatalogPort) -> None:
    list(port.record(make_run(), make_batches(1)))
    assert _read(port, MeasurementFilter(operator="gemm", device="a30")).num_rows == 4
    assert _read(port, MeasurementFilter(operator="gemm", device="a40")).num_rows == 0


def test_failed_rows_come_only_when_asked_for(port: CatalogPort) -> None:
    rows = make_rows([8], status="failed", status_reason="out of memory", latency_us_median=None)
    batch = MeasurementBatch(batch_index=0, rows=rows, is_last=True)
    list(port.record(make_run(), [batch]))
    assert _read(port).num_rows == 0
    assert _read(port, MeasurementFilter(include_failed=True)).num_rows == 1


def test_coverage_counts_rows(port: CatalogPort) -> None:
    list(port.record(make_run(), make_batches(2)))
    expected = Coverage(
        operator="gemm",
        device="a30",
        topology="",
        dtype="bf16",
        phase="forward",
        num_rows=8,
        num_flagged=0,
        num_failed=0,
        frameworks=("vllm 0.19",),
    )
    assert port.describe_coverage() == (expected,)


def test_runs_are_listed_as_they_were_recorded(port: CatalogPort) -> None:
    list(port.record(make_run("first"), make_batches(1)))
    list(port.record(make_run("second"), make_batches(2)))
    runs = port.list_runs()
    assert {summary.run.run_id: summary.num_rows for summary in runs} == {"first": 4, "second": 8}
    assert [summary.run for summary in runs if summary.run.run_id == "first"] == [make_run("first")]
    assert all(summary.completed_at for summary in runs)


def test_a_snapshot_identifies_content(port: CatalogPort) -> None:
    list(port.record(make_run("first"), make_batches(1)))
    before = port.describe_snapshot(MeasurementFilter(device="a30"))
    assert before == port.describe_snapshot(MeasurementFilter(device="a30"))
    assert before.num_rows == 4
    list(port.record(make_run("second"), make_batches(2)))
    after = port.describe_snapshot(MeasurementFilter(device="a30"))
    assert after.num_rows == 12
    assert after.content_hash != before.content_hash
