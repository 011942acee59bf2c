"""Send the batches of a run to a remote catalog, for asyncio."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.recording import (
    LOST,
    Group,
    Grouping,
    Parcel,
    delay_after,
    run_message,
)
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurement import BatchReceipt, MeasurementBatch, Run
from foretoken.wire import codec

if TYPE_CHECKING:
    # The stub files alone know this class.
    from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceAsyncStub

T = TypeVar("T")
Batches = Iterable[MeasurementBatch] | AsyncIterable[MeasurementBatch]


class AsyncRunSender:
    """`RunSender`, awaited; it waits for the receipts of a group before it sends the next.

    gRPC loses the status of a stream that ends while it is written to. So after a break batches go
    one by one, and what is wrong with one of them is heard.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        stub: "CatalogServiceAsyncStub",
        run: Run,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """Open the first stream."""
        self._connection = connection
        self._stub = stub
        self._run = run
        self._sleep = sleep
        self._pending: deque[Parcel] = deque()
        self._num_sent = 0
        self._num_receipts = 0
        self._open()

    async def send_all(self, batches: Batches) -> AsyncIterator[BatchReceipt]:
        """Send batches and yield their receipts."""
        grouping = Grouping(self._run)
        async for batch in _iterate(batches):
            group = grouping.add(batch)
            if group is not None:
                async for receipt in self._send(group):
                    yield receipt
        rest = grouping.flush()
        if rest is not None:
            async for receipt in self._send(rest):
                yield receipt

    async def finish(self) -> None:
        """End the stream in order: the catalog learns that no more comes."""
        await self._retry(self._say_farewell)

    async def abandon(self) -> None:
        """Break off; a batch without a receipt may be stored or not, and may be sent again."""
        await self._receipts.aclose()
        self._requests.put_nowait(None)

    def _open(self) -> None:
        self._requests: asyncio.Queue[catalog_pb2.RecordRequest | None] = asyncio.Queue()
        self._requests.put_nowait(run_message(self._run))
        self._receipts = self._connection.exchange(self._stub.Record, _drain(self._requests))
        self._num_sent = 0

    async def _send(self, group: Group) -> AsyncIterator[BatchReceipt]:
        for parcel in group:
            self._pending.append(parcel)
            self._put(parcel)
        while self._pending:
            yield await self._retry(self._next_receipt)

    async def _retry(self, action: Callable[[], Awaitable[T]]) -> T:
        """Return what an action does; where the stream is lost, what is pending is sent again."""
        options = self._connection.options
        for num_losses in range(options.max_reconnects):
            try:
                return await action()
            except LOST as err:
                for parcel in self._pending:
                    parcel.want_receipt()
                await self.abandon()
                await self._sleep(delay_after(err, num_losses + 1, options))
                self._open()
        return await action()

    async def _say_farewell(self) -> None:
        self._requests.put_nowait(None)
        try:
            async for _ in self._receipts:
                pass
        except ServiceUnavailableError:
            # Where every batch has its receipt, only the farewell got lost.
            if not self._num_receipts:
                raise

    async def _next_receipt(self) -> BatchReceipt:
        if not self._num_sent:
            self._put(self._pending[0])
        receipt = await anext(self._receipts, None)
        if receipt is None:
            raise ServiceUnavailableError("the catalog ended the stream early; retry")
        self._pending.popleft()
        self._num_sent -= 1
        self._num_receipts += 1
        return codec.decode(receipt, BatchReceipt)

    def _put(self, parcel: Parcel) -> None:
        self._num_sent += 1
        for message in parcel.messages:
            self._requests.put_nowait(message)


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
