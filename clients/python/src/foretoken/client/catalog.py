"""The catalog as a remote service."""

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import pyarrow as pa

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.api.types.v1 import measurement_pb2
from foretoken.client.channel import ChannelOptions, Connection
from foretoken.client.jobs import MAX_PAGE_SIZE
from foretoken.domain.errors import CatalogBusyError, ServiceUnavailableError
from foretoken.domain.measurement import (
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunSummary,
    Snapshot,
)
from foretoken.wire import codec, ipc


class CatalogClient:
    """Implements `CatalogPort` over a connection."""

    def __init__(self, connection: Connection, sleep: Callable[[float], None] = time.sleep) -> None:
        """Keep the connection, which must be open."""
        self._connection = connection
        self._stub = CatalogServiceStub(connection.channel)
        self._sleep = sleep

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the catalog at an address."""
        return cls(Connection.to(target, "catalog"))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        A batch is asked for when the one before has its receipt, in the caller's thread. One
        whose receipt is lost is sent again over a new stream, which is harmless.
        """
        sender = _RunSender(self._connection, self._stub, run, self._sleep)
        try:
            for batch in batches:
                yield sender.send(batch)
        except BaseException:
            sender.abandon()
            raise
        sender.finish()

    def read_measurements(self, selection: MeasurementFilter) -> pa.Table:
        """Return the selected rows in the Arrow measurement schema."""
        request = catalog_pb2.ReadMeasurementsRequest(
            selection=codec.encode(selection, measurement_pb2.MeasurementFilter)
        )
        chunks = self._connection.stream(self._stub.ReadMeasurements, request)
        return ipc.read_chunks(chunk.arrow_ipc for chunk in chunks)

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, dtype and phase."""
        request = catalog_pb2.DescribeCoverageRequest()
        answer = self._connection.call(self._stub.DescribeCoverage, request)
        return tuple(codec.decode(entry, Coverage) for entry in answer.coverage)

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""
        request = catalog_pb2.ListRunsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListRuns, request)
        return tuple(codec.decode(message, RunSummary) for page in pages for message in page.runs)

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects."""
        request = catalog_pb2.DescribeSnapshotRequest(
            selection=codec.encode(selection, measurement_pb2.MeasurementFilter)
        )
        return codec.decode(self._connection.call(self._stub.DescribeSnapshot, request), Snapshot)


class _RunSender:
    """Sends the batches of a run one by one, over as many streams as it takes."""

    def __init__(
        self,
        connection: Connection,
        stub: CatalogServiceStub,
        run: Run,
        sleep: Callable[[float], None],
    ) -> None:
        self._connection = connection
        self._stub = stub
        self._run = run
        self._sleep = sleep
        self._num_receipts = 0
        self._open()

    def send(self, batch: MeasurementBatch) -> BatchReceipt:
        """Return the receipt of a batch; where it is lost, the batch is sent again."""
        messages = batch_messages(batch)
        options = self._connection.options
        for num_losses in range(options.max_reconnects):
            try:
                return self._send_once(messages)
            except (ServiceUnavailableError, CatalogBusyError):
                self.abandon()
                self._sleep(options.reconnect_delay_s * 2.0**num_losses)
                self._open()
        return self._send_once(messages)

    def finish(self) -> None:
        """End the stream in order: the catalog learns that no more comes."""
        self._requests.put(None)
        try:
            for _ in self._receipts:
                pass
        except ServiceUnavailableError:
            # Where every batch has its receipt, only the farewell got lost.
            if not self._num_receipts:
                raise

    def abandon(self) -> None:
        """Break off; a batch without a receipt may be stored or not, and may be sent again."""
        self._receipts.close()
        self._requests.put(None)

    def _open(self) -> None:
        # gRPC takes requests in a thread of its own; None ends that thread.
        self._requests: queue.SimpleQueue[catalog_pb2.RecordRequest | None] = queue.SimpleQueue()
        self._requests.put(run_message(self._run))
        requests = iter(self._requests.get, None)
        self._receipts = self._connection.exchange(self._stub.Record, requests)

    def _send_once(self, messages: Iterable[catalog_pb2.RecordRequest]) -> BatchReceipt:
        for message in messages:
            self._requests.put(message)
        receipt = next(self._receipts, None)
        if receipt is None:
            raise ServiceUnavailableError("the catalog ended the stream early; retry")
        self._num_receipts += 1
        return codec.decode(receipt, BatchReceipt)


def run_message(run: Run) -> catalog_pb2.RecordRequest:
    """Return the first message of a stream that records a run."""
    return catalog_pb2.RecordRequest(run=codec.encode(run, measurement_pb2.Run))


def batch_messages(batch: MeasurementBatch) -> list[catalog_pb2.RecordRequest]:
    """Return the messages of one batch, in pieces."""
    chunks = list(ipc.write_chunks(batch.rows))
    return [
        catalog_pb2.RecordRequest(
            chunk=measurement_pb2.MeasurementChunk(
                batch_index=batch.batch_index,
                arrow_ipc=chunk,
                end_of_batch=number == len(chunks),
                last=batch.is_last,
            )
        )
        for number, chunk in enumerate(chunks, start=1)
    ]
