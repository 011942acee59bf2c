"""The services as remote ones, each over a connection: blocking, and awaited.

Clients are made of a table's lines, a method each, with the signature and the documentation of the
port's; mypy and editors know the first of the line.
"""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable
from types import GenericAlias
from typing import Any, Self, get_args

import pyarrow as pa

from foretoken.client.blocking import complete, iterate
from foretoken.client.calls import REPLIES, STREAMS, Calls, read_items, read_table
from foretoken.client.channel import AsyncConnection, Connection
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.sending import Batches, Content, send_run, upload
from foretoken.domain.measurements.measurement import (
    Artifact,
    BatchReceipt,
    MeasurementBatch,
    Run,
)
from foretoken.wire import ipc
from foretoken.wire.rpc import Awaited, Blocking, ByHand, Rpc, RpcMessages, RpcTable, Table
from foretoken.wire.rpcs import CatalogRpcs, PredictorRpcs, ProfilerRpcs, SimulatorRpcs


class Client(RpcTable, Blocking):
    """A service at an address; closing it closes the connection."""

    def __init__(self, connection: Connection) -> None:
        """Keep the connection, which must be open."""
        self._connection = connection
        self.calls = Calls(connection, type(self))

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the methods."""
        super().__init_subclass__(**options)
        _make_methods(cls, _blocking_method)

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the service at an address."""
        return cls(Connection.to(target, cls.short_name()))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()


class AsyncClient(RpcTable, Awaited):
    """`Client` for asyncio, in the event loop it was made in."""

    def __init__(self, connection: AsyncConnection) -> None:
        """Keep the connection, which must be open."""
        self._connection = connection
        self.calls = Calls(connection, type(self))

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the methods."""
        super().__init_subclass__(**options)
        _make_methods(cls, _awaited_method)

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the service at an address."""
        return cls(AsyncConnection.to(target, cls.short_name()))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self.close()


Make = Callable[[Rpc[..., Any]], tuple[Callable[..., Any], Any]]


def _make_methods(cls: type[RpcTable], make: Make) -> None:
    for name, line in cls.lines().items():
        # A class may have a method of its own in the place of a line.
        if isinstance(line, ByHand) or inspect.getattr_static(cls, name) is not line:
            continue
        method, returns = make(line)
        signature = inspect.signature(line.method)
        vars_of: Any = method
        vars_of.__signature__ = signature.replace(return_annotation=returns)
        method.__doc__ = inspect.getdoc(line.method)
        method.__name__, method.__module__ = name, cls.__module__
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)


def _messages(client: Any, name: str) -> tuple[Calls, RpcMessages]:
    calls: Calls = client.calls
    return calls, calls.messages[name]


def _blocking_method(line: Rpc[..., Any]) -> tuple[Callable[..., Any], Any]:
    """Return a method of a blocking client, and what it returns."""
    name, returns = line.name, inspect.signature(line.method).return_annotation
    if (reply := REPLIES.get(type(line))) is not None:

        def ask(self: Any, *args: Any, **named: Any) -> Any:
            calls, messages = _messages(self, name)
            return complete(reply(calls, messages, messages.bind(args, named)))

        return ask, returns
    if isinstance(line, Table):

        def read(self: Any, *args: Any, **named: Any) -> pa.RecordBatchReader:
            calls, messages = _messages(self, name)
            chunks = read_items(calls, messages, messages.bind(args, named))
            return ipc.open_chunks(iterate(chunks))

        return read, pa.RecordBatchReader
    stream = STREAMS[type(line)]

    def listen(self: Any, *args: Any, **named: Any) -> Generator[Any]:
        calls, messages = _messages(self, name)
        return iterate(stream(calls, messages, messages.bind(args, named)))

    return listen, returns


def _awaited_method(line: Rpc[..., Any]) -> tuple[Callable[..., Any], Any]:
    """Return a method of a client for asyncio, and what it returns."""
    name, returns = line.name, inspect.signature(line.method).return_annotation
    if (reply := REPLIES.get(type(line))) is not None:

        async def ask(self: Any, *args: Any, **named: Any) -> Any:
            calls, messages = _messages(self, name)
            return await reply(calls, messages, messages.bind(args, named))

        return ask, returns
    if isinstance(line, Table):

        async def read(self: Any, *args: Any, **named: Any) -> pa.Table:
            calls, messages = _messages(self, name)
            return await read_table(calls, messages, messages.bind(args, named))

        return read, pa.Table
    stream = STREAMS[type(line)]

    def listen(self: Any, *args: Any, **named: Any) -> AsyncGenerator[Any]:
        calls, messages = _messages(self, name)
        items: AsyncGenerator[Any] = stream(calls, messages, messages.bind(args, named))
        return items

    return listen, GenericAlias(AsyncIterator, get_args(returns))


class CatalogClient(Client, CatalogRpcs):
    """Implements `CatalogAdminPort` over a connection."""

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Generator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        A profile's batch is asked for when the one before has its receipt; of an import two groups
        of batches at most are read ahead. Batches are asked for in the caller's thread. One whose
        receipt is lost is sent again over a new stream, which is harmless.
        """
        return iterate(send_run(self.calls, run, batches))

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        """Keep a file; the same name and content again changes nothing.

        The content is asked for in a thread of gRPC's.
        """
        return complete(upload(self.calls, artifact, content))


class PredictorClient(Client, PredictorRpcs):
    """Implements `PredictorPort` over a connection."""


class ProfilerClient(Client, ProfilerRpcs):
    """Implements `ProfilerPort` over a connection."""


class SimulatorClient(Client, SimulatorRpcs):
    """Implements `SimulatorPort` over a connection."""


class AsyncCatalogClient(AsyncClient, CatalogRpcs):
    """`CatalogClient`, awaited."""

    def record(self, run: Run, batches: Batches) -> AsyncGenerator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        See `CatalogClient.record`; here a group waits for the receipts of the one before.
        """
        return send_run(self.calls, run, batches)

    async def store_artifact(self, artifact: Artifact, content: Content) -> Artifact:
        """Keep a file; the same name and content again changes nothing."""
        return await upload(self.calls, artifact, content)


class AsyncPredictorClient(AsyncClient, PredictorRpcs):
    """`PredictorClient`, awaited."""


class AsyncProfilerClient(AsyncClient, ProfilerRpcs):
    """`ProfilerClient`, awaited."""


class AsyncSimulatorClient(AsyncClient, SimulatorRpcs):
    """`SimulatorClient`, awaited."""
