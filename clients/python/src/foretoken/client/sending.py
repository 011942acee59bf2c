"""Send the batches of a run, or a file, to a remote catalog."""

import dataclasses
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import artifact_pb2, measurement_pb2
from foretoken.client.blocking import each
from foretoken.client.calls import Calls
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import CatalogBusyError, ServerBusyError, ServiceUnavailableError
from foretoken.domain.measurements.measurement import (
    Artifact,
    BatchReceipt,
    MeasurementBatch,
    Run,
    RunKind,
)
from foretoken.wire import codec, ipc

# A group of an import's batches waits for its receipts together. Two groups are under way at once,
# so that the catalog stores one while the next travels; nothing more is read ahead.
GROUP_BATCHES = 64
GROUP_BYTES = 32 * 2**20

_LOST = (ServiceUnavailableError, CatalogBusyError, ServerBusyError)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch as it travels."""

    messages: tuple[catalog_pb2.RecordRequest, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its Arrow data."""
        return sum(len(message.chunk.arrow_ipc) for message in self.messages)

    def want_receipt(self) -> None:
        """Ask for its receipt before anything more is sent."""
        for message in self.messages:
            message.chunk.receipt_wanted = True


Group = tuple[Parcel, ...]
Batches = Iterable[MeasurementBatch] | AsyncIterable[MeasurementBatch]
T = TypeVar("T")


def _delay_after(error: Exception, num_losses: int, options: ChannelOptions) -> float:
    """Return the seconds to wait before the next stream, at least those a server requires."""
    at_least_s = error.retry_after_s if isinstance(error, ServerBusyError) else 0.0
    return options.delay_after(num_losses, at_least_s)


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
                receipt_wanted=batch.wants_receipt,
            )
        )
        for number, chunk in enumerate(chunks, start=1)
    ]


class Grouping:
    """Collects batches into groups; the last batch of a group wants its receipt.

    An import's batches travel in groups, since they become visible together only. Every batch of a
    profile is a group of its own: its sender measures between batches and sees how far it is.
    """

    def __init__(self, run: Run) -> None:
        """Begin with nothing collected."""
        self._is_grouped = run.kind is RunKind.IMPORT
        self._collected: list[Parcel] = []
        self._num_bytes = 0
        self._held: MeasurementBatch | None = None

    def add(self, batch: MeasurementBatch) -> Group | None:
        """Take a batch, and return the group that is full, if one is.

        Of an import one batch is held back until it is known whether another follows.
        """
        if not self._is_grouped or batch.wants_receipt or batch.is_last:
            return self._close(batch)
        full = None
        if self._held is not None:
            if len(self._collected) + 1 >= GROUP_BATCHES or self._num_bytes >= GROUP_BYTES:
                full = self._close(None)
            else:
                self._collect(self._held)
        self._held = batch
        return full

    def flush(self) -> Group | None:
        """Return what is left when no batch follows."""
        return self._close(None) if self._held is not None else None

    def _close(self, last: MeasurementBatch | None) -> Group:
        if last is None:
            last, self._held = self._held, None
        elif self._held is not None:
            self._collect(self._held)
            self._held = None
        if last is not None:
            self._collect(dataclasses.replace(last, wants_receipt=True))
        group, self._collected, self._num_bytes = tuple(self._collected), [], 0
        return group

    def _collect(self, batch: MeasurementBatch) -> None:
        parcel = Parcel(tuple(batch_messages(batch)))
        self._collected.append(parcel)
        self._num_bytes += parcel.num_bytes


async def send_run(calls: Calls, run: Run, batches: Batches) -> AsyncGenerator[BatchReceipt]:
    """Store batches of a run, yielding a receipt for each once it is on disk."""
    sender = _RunSender(calls, run)
    try:
        async with aclosing(sender.send_all(batches)) as receipts:
            async for receipt in receipts:
                yield receipt
    except BaseException:
        await sender.abandon()
        raise
    await sender.finish()


class _RunSender:
    """Sends groups of batches; what a broken stream left without receipt is sent again.

    Where a stream that ends while it is written to loses its status, the receipts of a group are
    waited for before the next is sent, and after a break batches go one by one: so what is wrong
    with one of them is heard.
    """

    def __init__(self, calls: Calls, run: Run) -> None:
        """Open the first stream."""
        self._calls = calls
        self._run = run
        self._loses_status = calls.transport.loses_status
        self._max_groups = 2 if run.kind is RunKind.IMPORT and not self._loses_status else 1
        self._pending: deque[Parcel] = deque()
        self._group_sizes: deque[int] = deque()
        self._num_sent = 0
        self._num_receipts = 0
        self._open()

    async def send_all(self, batches: Batches) -> AsyncGenerator[BatchReceipt]:
        """Send batches and yield their receipts, reading no further ahead than two groups."""
        grouping = Grouping(self._run)
        async for batch in each(batches):
            group = grouping.add(batch)
            if group is not None:
                self._send(group)
                while len(self._group_sizes) >= self._max_groups:
                    for _ in range(self._group_sizes[0]):
                        yield await self._retry(self._next_receipt)
                    self._group_sizes.popleft()
        rest = grouping.flush()
        if rest is not None:
            self._send(rest)
        while self._pending:
            yield await self._retry(self._next_receipt)

    async def finish(self) -> None:
        """End the stream in order: the catalog learns that no more comes."""
        await self._retry(self._say_farewell)

    async def abandon(self) -> None:
        """Break off; a batch without a receipt may be stored or not, and may be sent again."""
        await self._receipts.aclose()
        self._feed.put(None)

    def _open(self) -> None:
        self._feed = self._calls.transport.feed()
        self._feed.put(run_message(self._run))
        method = self._calls.method(self._calls.messages["record"])
        self._receipts = self._calls.transport.answers(method, self._feed.requests)
        self._num_sent = 0
        if not self._loses_status:
            for parcel in self._pending:
                self._put(parcel)

    def _send(self, group: Group) -> None:
        for parcel in group:
            self._pending.append(parcel)
            self._put(parcel)
        self._group_sizes.append(len(group))

    async def _retry(self, action: Callable[[], Awaitable[T]]) -> T:
        """Return what an action does; where the stream is lost, what is pending is sent again."""
        options = self._calls.options
        for num_losses in range(options.max_reconnects):
            try:
                return await action()
            except _LOST as err:
                if self._loses_status:
                    for parcel in self._pending:
                        parcel.want_receipt()
                await self.abandon()
                await self._calls.transport.wait(_delay_after(err, num_losses + 1, options))
                self._open()
        return await action()

    async def _say_farewell(self) -> None:
        self._feed.put(None)
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
            self._feed.put(message)


Content = Iterable[bytes] | AsyncIterable[bytes]

# A message of a stream.
_PIECE_BYTES = 2 * 2**20


async def upload(calls: Calls, artifact: Artifact, content: Content) -> Artifact:
    """Keep a file, and return what the catalog knows of it.

    gRPC requests the content in a thread or task of its own. An error of whoever gives it comes
    before what it made of the call.
    """
    errors: list[Exception] = []
    method = calls.method(calls.messages["store_artifact"])
    try:
        answer = await calls.ask(
            lambda left_s: calls.transport.send(
                method, calls.transport.requests(_messages(artifact, content, errors)), left_s
            ),
            calls.options.stream_deadline_s,
            is_repeatable=not isinstance(content, Iterator | AsyncIterator),
        )
    except BaseException:  # asyncio's client cancels the caller then
        for error in errors:
            raise error from None
        raise
    return codec.decode(answer, Artifact)


async def _messages(
    artifact: Artifact, content: Content, errors: list[Exception]
) -> AsyncGenerator[catalog_pb2.StoreArtifactRequest]:
    """Yield what is known of the file, then its content; note what error that raises."""
    message = codec.encode(artifact, artifact_pb2.Artifact)
    yield catalog_pb2.StoreArtifactRequest(artifact=message)
    try:
        async for piece in each(content):
            for start in range(0, len(piece), _PIECE_BYTES):
                chunk = piece[start : start + _PIECE_BYTES]
                yield catalog_pb2.StoreArtifactRequest(chunk=chunk)
    except Exception as err:
        errors.append(err)
        raise
