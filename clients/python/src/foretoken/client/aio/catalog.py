"""The catalog as a remote service, for asyncio."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.api.types.v1 import measurement_pb2
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.catalog import batch_messages, run_message
from foretoken.client.channel import ChannelOptions
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

if TYPE_CHECKING:
    # The stub files alone know this class.
    from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceAsyncStub

Batches = Iterable[MeasurementBatch] | AsyncIterable[MeasurementBatch]


class AsyncCatalogClient:
    """`CatalogClient`, awaited."""

    def __init__(
        self,
        connection: AsyncConnection,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Keep the connection, which must be open."""
        self._connection = connection
        self._stub = CatalogServiceStub(connection.channel)
        self._sleep = sleep

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the catalog at an address."""
        return cls(AsyncConnection.to(target, "catalog"))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self.close()

    async def record(self, run: Run, batches: Batches) -> AsyncIterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        A batch whose receipt is lost is sent again over a new stream, which is harmless.
        """
        sender = _RunSender(self._connection, self._stub, run, self._sleep)
        try:
            async for batch in _iterate(batches):
                yield await sender.send(batch)
        except BaseException:
            await sender.abandon()
            raise
        await sender.finish()

    async def read_measurements(self, selection: MeasurementFilter) -> pa.Table:
        """Return the selected rows in the Arrow measurement schema."""
        request = catalog_pb2.ReadMeasurementsRequest(
            selection=codec.encode(selection, measurement_pb2.MeasurementFilter)
        )
        stream = self._connection.stream(self._stub.ReadMeasurements, request)
        return ipc.read_chunks([chunk.arrow_ipc async for chunk in stream])

    async def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, dtype and phase."""
        request = catalog_pb2.DescribeCoverageRequest()
        answer = await self._connection.call(self._stub.DescribeCoverage, request)
        return tuple(codec.decode(entry, Coverage) for entry in answer.coverage)

    async def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""
        request = catalog_pb2.ListRunsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListRuns, request)
        return tuple(
            [codec.decode(message, RunSummary) async for page in pages for message in page.runs]
        )

    async def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects."""
        request = catalog_pb2.DescribeSnapshotRequest(
            selection=codec.encode(selection, measurement_pb2.MeasurementFilter)
        )
        answer = await self._connection.call(self._stub.DescribeSnapshot, request)
        return codec.decode(answer, Snapshot)


class _RunSender:
    """Sends the batches of a run one by one, over as many streams as it takes."""

    def __init__(
        self,
        connection: AsyncConnection,
        stub: "CatalogServiceAsyncStub",
        run: Run,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._stub = stub
        self._run = run
        self._sleep = sleep
        self._num_receipts = 0
        self._open()

    async def send(self, batch: MeasurementBatch) -> BatchReceipt:
        """Return the receipt of a batch; where it is lost, the batch is sent again."""
        messages = batch_messages(batch)
        options = self._connection.options
        for num_losses in range(options.max_reconnects):
            try:
                return await self._send_once(messages)
            except (ServiceUnavailableError, CatalogBusyError):
                await self.abandon()
                await self._sleep(options.reconnect_delay_s * 2.0**num_losses)
                self._open()
        return await self._send_once(messages)

    async def finish(self) -> None:
        """End the stream in order: the catalog learns that no more comes."""
        self._requests.put_nowait(None)
        try:
            async for _ in self._receipts:
                pass
        except ServiceUnavailableError:
            # Where every batch has its receipt, only the farewell got lost.
            if not self._num_receipts:
                raise

    async def abandon(self) -> None:
        """Break off; a batch without a receipt may be stored or not, and may be sent again."""
        await self._receipts.aclose()
        self._requests.put_nowait(None)

    def _open(self) -> None:
        self._requests: asyncio.Queue[catalog_pb2.RecordRequest | None] = asyncio.Queue()
        self._requests.put_nowait(run_message(self._run))
        self._receipts = self._connection.exchange(self._stub.Record, _drain(self._requests))

    async def _send_once(self, messages: Iterable[catalog_pb2.RecordRequest]) -> BatchReceipt:
        for message in messages:
            self._requests.put_nowait(message)
        receipt = await anext(self._receipts, None)
        if receipt is None:
            raise ServiceUnavailableError("the catalog ended the stream early; retry")
        self._num_receipts += 1
        return codec.decode(receipt, BatchReceipt)


async def _drain(
    requests: "asyncio.Queue[catalog_pb2.RecordRequest | None]",
) -> AsyncIterator[catalog_pb2.RecordRequest]:
    while (request := await requests.get()) is not None:
        yield request


async def _iterate(batches: Batches) -> AsyncIterator[MeasurementBatch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
