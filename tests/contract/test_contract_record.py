"""What can happen to a recording over gRPC that cannot happen in one process."""

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from contract_fakes import FakeCatalog
from contract_rows import make_batches, make_run
from loopback import serve

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.catalog import servicer
from foretoken.client.calls import Method
from foretoken.client.channel import Connection
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.sending import GROUP_BATCHES, batch_messages, run_message
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import (
    CatalogBusyError,
    InvalidRequestError,
    RunConflictError,
    ServiceUnavailableError,
)
from foretoken.domain.measurements.measurement import MeasurementBatch, MeasurementFilter, RunKind
from foretoken.wire.arrow import read_table


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


@pytest.fixture
def options(catalog: FakeCatalog) -> Iterator[ChannelOptions]:
    with serve(servicer.register, catalog) as options:
        yield options


@pytest.fixture
def client(options: ChannelOptions) -> Iterator[CatalogClient]:
    with CatalogClient.connect(dataclasses.replace(options, max_reconnects=5)) as client:
        yield client


def test_a_batch_whose_receipt_is_lost_is_sent_again(
    catalog: FakeCatalog, client: CatalogClient
) -> None:
    catalog.lost = [CatalogBusyError("busy"), ServiceUnavailableError("gone")]
    receipts = list(client.record(make_run(), make_batches(3)))
    assert [receipt.batch_index for receipt in receipts] == [0, 1, 2]
    assert [receipt.was_duplicate for receipt in receipts] == [True, False, False]
    assert (catalog.num_streams, len(catalog.batches)) == (3, 3)


def test_of_a_broken_group_what_has_no_receipt_is_sent_again(
    catalog: FakeCatalog, client: CatalogClient
) -> None:
    """Two groups are under way when the first stream breaks in the middle of the first."""
    receipts = client.record(make_run(), make_batches(150))
    catalog.lost = [CatalogBusyError("busy")]
    found = list(receipts)
    assert [receipt.batch_index for receipt in found] == list(range(150))
    assert [receipt.batch_index for receipt in found if receipt.was_duplicate] == [0]
    assert (catalog.num_streams, len(catalog.batches)) == (2, 150)


def test_a_sender_is_read_no_further_ahead_than_two_groups(client: CatalogClient) -> None:
    """However long the import, so much lies in memory and no more."""
    num_read = 0

    def send() -> Iterator[MeasurementBatch]:
        nonlocal num_read
        for batch in make_batches(500):
            num_read += 1
            yield batch

    receipts = client.record(make_run(), send())
    next(receipts)
    assert num_read == 2 * GROUP_BATCHES + 1
    receipts.close()  # type: ignore[attr-defined]


def test_a_recording_outlives_the_deadline_of_its_streams(
    catalog: FakeCatalog, options: ChannelOptions
) -> None:
    """A profiler takes hours between the first batch and the last."""

    def send() -> Iterator[MeasurementBatch]:
        for batch in make_batches(3):
            time.sleep(0.3)
            yield batch
        time.sleep(0.3)

    short = dataclasses.replace(options, stream_deadline_s=0.2)
    with CatalogClient.connect(short) as client:
        receipts = list(client.record(make_run(), send()))
    assert [receipt.batch_index for receipt in receipts] == [0, 1, 2]
    assert len(catalog.batches) == 3


def test_a_catalog_that_stays_away_is_an_error(catalog: FakeCatalog, client: CatalogClient) -> None:
    catalog.lost = [CatalogBusyError("busy")] * 100
    with pytest.raises(CatalogBusyError, match="busy"):
        list(client.record(make_run(), make_batches(1)))


def test_other_errors_are_not_tried_again(catalog: FakeCatalog, client: CatalogClient) -> None:
    catalog.lost = [RunConflictError("other content")]
    with pytest.raises(RunConflictError):
        list(client.record(make_run(), make_batches(1)))
    assert catalog.num_streams == 1


def test_a_batch_larger_than_a_message_travels_in_pieces(
    catalog: FakeCatalog, client: CatalogClient
) -> None:
    """24 MB, where one message may have 16 MiB; and back again."""
    rows = pa.table({"value": np.arange(3_000_000)})
    list(client.record(make_run(), [MeasurementBatch(batch_index=0, rows=rows, is_last=True)]))
    assert catalog.batches["run-1", 0] == rows
    assert read_table(client.read_measurements(MeasurementFilter(run_id="run-1"))) == rows


def test_a_sender_that_breaks_off_leaves_nothing_open(
    catalog: FakeCatalog, client: CatalogClient
) -> None:
    """The catalog must not hold a thread for it, nor take the batches for a whole run."""
    receipts = client.record(make_run(kind=RunKind.PROFILE), make_batches(3))
    next(receipts)
    assert catalog.num_open_streams == 1
    receipts.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60.0
    while catalog.num_open_streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert catalog.num_open_streams == 0
    assert list(catalog.batches) == [("run-1", 0)]


def test_a_run_without_batches_still_reaches_the_catalog(
    catalog: FakeCatalog, client: CatalogClient
) -> None:
    assert list(client.record(make_run(), [])) == []
    assert catalog.num_streams == 1


def test_a_long_list_comes_in_pages(catalog: FakeCatalog, client: CatalogClient) -> None:
    assert client.list_runs() == catalog.list_runs()


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "run"),
        (batch_messages(make_batches(1)[0]), "run"),
        ([catalog_pb2.RecordRequest()], "run"),
        ([run_message(make_run()), run_message(make_run())], "chunk"),
    ],
    ids=["nothing", "a chunk first", "an empty message", "the run twice"],
)
def test_a_stream_out_of_order_is_refused(
    messages: list[catalog_pb2.RecordRequest], field: str, options: ChannelOptions
) -> None:
    connection = Connection(options, "catalog").open()
    stub = CatalogServiceStub(connection.channel)
    with pytest.raises(InvalidRequestError) as caught:
        list(connection.exchange(Method("/Record", stub.Record), iter(messages)))
    connection.close()
    assert [violation.field for violation in caught.value.violations] == [field]


def test_bytes_that_are_not_arrow_are_refused(options: ChannelOptions) -> None:
    messages = [run_message(make_run()), *batch_messages(make_batches(1)[0])]
    messages[1].chunk.arrow_ipc = b"certainly not Arrow"
    connection = Connection(options, "catalog").open()
    stub = CatalogServiceStub(connection.channel)
    with pytest.raises(InvalidRequestError, match="not an Arrow IPC stream"):
        list(connection.exchange(Method("/Record", stub.Record), iter(messages)))
    connection.close()
