"""Send the batches of a run to a remote catalog, over as many streams as it takes."""

import dataclasses
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.api.types.v1 import measurement_pb2
from foretoken.client.channel import Connection
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import CatalogBusyError, ServerBusyError, ServiceUnavailableError
from foretoken.domain.measurement import BatchReceipt, MeasurementBatch, Run, RunKind
from foretoken.wire import codec, ipc

# A group of an import's batches waits for its receipts together. Two groups are under way at once,
# so that the catalog stores one while the next travels; nothing more is read ahead.
GROUP_BATCHES = 64
GROUP_BYTES = 32 * 2**20

LOST = (ServiceUnavailableError, CatalogBusyError, ServerBusyError)


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
T = TypeVar("T")


def delay_after(error: Exception, num_losses: int, options: ChannelOptions) -> float:
    """Return the seconds to wait before the next stream, which are at least what a server asks."""
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


class RunSender:
    """Sends groups of batches; what a broken stream left without receipt is sent again."""

    def __init__(
        self,
        connection: Connection,
        stub: CatalogServiceStub,
        run: Run,
        sleep: Callable[[float], None],
    ) -> None:
        """Open the first stream."""
        self._connection = connection
        self._stub = stub
        self._run = run
        self._sleep = sleep
        self._max_groups = 2 if run.kind is RunKind.IMPORT else 1
        self._pending: deque[Parcel] = deque()
        self._group_sizes: deque[int] = deque()
        self._num_receipts = 0
        self._open()

    def send_all(self, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Send batches and yield their receipts, reading no further ahead than two groups."""
        grouping = Grouping(self._run)
        for batch in batches:
            group = grouping.add(batch)
            if group is not None:
                yield from self._send(group)
        rest = grouping.flush()
        if rest is not None:
            yield from self._send(rest)
        while self._group_sizes:
            yield from self._take_group()

    def finish(self) -> None:
        """End the stream in order: the catalog learns that no more comes."""
        self._retry(self._say_farewell)

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
        for parcel in self._pending:
            self._put(parcel)

    def _send(self, group: Group) -> Iterator[BatchReceipt]:
        for parcel in group:
            self._pending.append(parcel)
            self._put(parcel)
        self._group_sizes.append(len(group))
        if len(self._group_sizes) >= self._max_groups:
            yield from self._take_group()

    def _take_group(self) -> Iterator[BatchReceipt]:
        for _ in range(self._group_sizes[0]):
            yield self._retry(self._next_receipt)
        self._group_sizes.popleft()

    def _retry(self, action: Callable[[], T]) -> T:
        """Return what an action does; where the stream is lost, what is pending is sent again."""
        options = self._connection.options
        for num_losses in range(options.max_reconnects):
            try:
                return action()
            except LOST as err:
                self.abandon()
                self._sleep(delay_after(err, num_losses + 1, options))
                self._open()
        return action()

    def _say_farewell(self) -> None:
        self._requests.put(None)
        try:
            for _ in self._receipts:
                pass
        except ServiceUnavailableError:
            # Where every batch has its receipt, only the farewell got lost.
            if not self._num_receipts:
                raise

    def _next_receipt(self) -> BatchReceipt:
        receipt = next(self._receipts, None)
        if receipt is None:
            raise ServiceUnavailableError("the catalog ended the stream early; retry")
        self._pending.popleft()
        self._num_receipts += 1
        return codec.decode(receipt, BatchReceipt)

    def _put(self, parcel: Parcel) -> None:
        for message in parcel.messages:
            self._requests.put(message)
