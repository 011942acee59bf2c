"""How each kind of rpc is called, for both clients: what it awaits says which of them it is."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast

import grpc
import pyarrow as pa

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.retries import LossCount, Refusals, WatchState
from foretoken.domain.call_scope import within_call
from foretoken.domain.errors import CatalogBusyError, ServerBusyError, ServiceUnavailableError
from foretoken.wire import ipc
from foretoken.wire.errors import rpc_to_error
from foretoken.wire.result_file import table_fields, with_tables
from foretoken.wire.rpc import (
    Pages,
    Parts,
    Report,
    Rpc,
    RpcMessages,
    RpcTable,
    States,
    Stream,
    Unary,
    Watch,
    messages_of,
)

A = TypeVar("A")
Values = Sequence[Any]

_PAGE_SIZE = 1_000
# How often a query is asked again because a training changed the model between its parts.
_MAX_MODEL_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Feed:
    """Requests of a stream, put one by one; None ends it."""

    put: Callable[[Any], None]
    requests: Any


@dataclass(frozen=True, slots=True)
class Method:
    """What gRPC calls an rpc with, and the full name of it."""

    path: str
    call: Any


class Transport(Protocol):
    """A connection as calls see it. The blocking one has done what it awaits before it returns."""

    options: ChannelOptions
    peer: str
    # Whether a stream that ends while it is written to ends without its status.
    loses_status: ClassVar[bool]

    @property
    @abstractmethod
    def channel(self) -> Any:
        """The open channel."""

    @abstractmethod
    async def send(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Return the answer to one request, or to a stream of them."""

    @abstractmethod
    def answers(
        self, method: Method, request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any]:
        """Yield the answers to one request or a stream of them; closing this cancels the call.

        They may take the options' deadline of a stream, unless another is given.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """

    @abstractmethod
    async def wait(self, delay_s: float) -> None:
        """Wait so many seconds."""

    @abstractmethod
    def feed(self) -> Feed:
        """Return requests for `answers`, to be put while answers are read."""

    @abstractmethod
    def requests(self, messages: AsyncGenerator[Any]) -> Any:
        """Return messages as requests for `send`, taken in a thread or task of gRPC's."""


class Calls:
    """Calls of one service's rpcs over a connection."""

    def __init__(self, transport: Transport, table: type[RpcTable]) -> None:
        """Keep the connection, which must be open."""
        self.transport = transport
        self.messages = messages_of(table)
        # Made now, for gRPC does not survive making one of a closed channel.
        self._channel, self._methods = self._open_methods()

    def _open_methods(self) -> tuple[Any, Mapping[str, Method]]:
        channel = self.transport.channel
        return channel, {
            messages.path: _open_method(channel, messages) for messages in self.messages.values()
        }

    @property
    def options(self) -> ChannelOptions:
        """Those of the connection."""
        return self.transport.options

    def method(self, messages: RpcMessages) -> Method:
        """Return what gRPC calls an rpc with."""
        if self.transport.channel is not self._channel:
            self._channel, self._methods = self._open_methods()
        return self._methods[messages.path]

    async def call(
        self, messages: RpcMessages, request: Any, deadline_s: float | None = None
    ) -> Any:
        """Return the answer to one request, by default within the options' deadline.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        method = self.method(messages)
        return await self.ask(
            lambda left_s: self.transport.send(method, request, left_s),
            deadline_s or self.options.deadline_s,
        )

    async def ask(
        self,
        attempt: Callable[[float], Awaitable[A]],
        deadline_s: float,
        *,
        is_repeatable: bool = True,
    ) -> A:
        """Return what an attempt returns, which is given the seconds left; again where refused.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.
            InvalidRequestError: the connection is closed.

        """
        # Asked for, since that checks that it is open.
        _ = self.transport.channel
        refusals = Refusals(self.options, within_call(deadline_s))
        while True:
            try:
                return await attempt(refusals.left_s)
            except grpc.RpcError as err:
                error = rpc_to_error(err, self.transport.peer)
            if not is_repeatable:
                raise error
            await self.transport.wait(refusals.delay_after(error))

    async def stream(self, messages: RpcMessages, request: Any) -> AsyncGenerator[Any]:
        """Yield the answers to one request, which is made again where it is refused.

        One that changes nothing is also made again where the service cannot be reached, before
        there was an answer. The call starts with the first answer that is asked for; leaving early
        cancels it.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        refusals = Refusals(self.options, within_call(self.options.stream_deadline_s))
        has_begun = False
        while True:
            try:
                async with aclosing(self.watch(messages, request, refusals.left_s)) as answers:
                    async for answer in answers:
                        has_begun = True
                        yield answer
            except ServerBusyError as err:
                if has_begun:
                    raise
                await self.transport.wait(refusals.delay_after(err))
            except (ServiceUnavailableError, CatalogBusyError) as err:
                if has_begun or not messages.line.is_idempotent:
                    raise
                await self.transport.wait(refusals.delay_after_loss(err))
            else:
                return

    def watch(
        self, messages: RpcMessages, request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any]:
        """Yield the answers to one request, once; as `stream` otherwise."""
        return self.transport.answers(self.method(messages), request, timeout_s)


def _open_method(channel: Any, messages: RpcMessages) -> Method:
    call = getattr(channel, messages.kind)(
        messages.path,
        request_serializer=messages.request_class.SerializeToString,
        response_deserializer=messages.reply_class.FromString,
        _registered_method=True,
    )
    return Method(messages.path, call)


async def ask(calls: Calls, messages: RpcMessages, values: Values) -> Any:
    """Return the reply to one request."""
    line = cast("Unary[..., Any]", messages.line)
    if line.parts is not None:
        return await _ask_in_parts(calls, messages, values[0], line.parts)
    deadline_s = calls.options.stream_deadline_s if line.is_long else None
    answer = await calls.call(messages, messages.encode_request(values), deadline_s)
    return messages.decode_reply(answer, values)


async def _ask_in_parts(calls: Calls, messages: RpcMessages, query: Any, parts: Parts) -> Any:
    """Return the reply to a request that travels as several, all answered by one version."""
    requests = [messages.encode_request((part,)) for part in parts.cut(query)]
    for _ in range(_MAX_MODEL_CHANGES):
        replies = [
            messages.decode_reply(await calls.call(messages, request), (query,))
            for request in requests
        ]
        if len({parts.version(reply) for reply in replies}) == 1:
            return parts.join(query, replies)
    raise ServiceUnavailableError(
        f"the {calls.transport.peer} keeps changing its model; retry later"
    )


async def list_all(calls: Calls, messages: RpcMessages, values: Values) -> tuple[Any, ...]:
    """Return the items of all pages of a list."""
    items: list[Any] = []
    request = messages.encode_request(values, page_size=_PAGE_SIZE)
    while True:
        page = await calls.call(messages, request)
        items.extend(messages.decode_reply(page, values))
        if not page.next_page_token:
            return tuple(items)
        request.page_token = page.next_page_token


async def ask_for_report(calls: Calls, messages: RpcMessages, values: Values) -> Any:
    """Return a report with the columns that its message left out."""
    report = await ask(calls, messages, values)
    line = cast("Report[..., Any]", messages.line)
    if not line.has_tables(report):
        return report
    reading = calls.messages[line.tables.name]
    tables = {
        name: await read_table(calls, reading, (*values, name))
        for name in table_fields(type(report))
    }
    return with_tables(report, tables)


async def read_table(calls: Calls, messages: RpcMessages, values: Values) -> pa.Table:
    """Return all rows of a table."""
    return ipc.read_chunks([chunk async for chunk in read_items(calls, messages, values)])


async def read_items(calls: Calls, messages: RpcMessages, values: Values) -> AsyncGenerator[Any]:
    """Yield the items of a stream; of a table, the pieces of its bytes."""
    request = messages.encode_request(values)
    async with aclosing(calls.stream(messages, request)) as answers:
        async for answer in answers:
            yield messages.decode_reply(answer, values)


async def follow(calls: Calls, messages: RpcMessages, values: Values) -> AsyncGenerator[Any]:
    """Yield items from the `first` on, the last value; a stream that breaks is taken up there."""
    *which, first = values
    losses = LossCount(calls.options)
    while True:
        request = messages.encode_request((*which, first))
        try:
            async with aclosing(calls.watch(messages, request)) as answers:
                async for answer in answers:
                    losses.forget()
                    first += 1
                    yield messages.decode_reply(answer, values)
        except (ServiceUnavailableError, ServerBusyError) as err:
            losses.add(err)
            await calls.transport.wait(losses.delay_s)
        else:
            return


async def follow_job(calls: Calls, messages: RpcMessages, values: Values) -> AsyncGenerator[Any]:
    """Yield a job now and at its changes until it is final, the final state last.

    A stream that breaks or ends is taken up again; where the service has no stream to spare, the
    state is asked for now and then.
    """
    watch = WatchState(calls.options)
    request = messages.encode_request(values)
    while not watch.is_over:
        try:
            async with aclosing(calls.watch(messages, request)) as answers:
                async for answer in answers:
                    job = messages.decode_reply(answer, values)
                    if watch.accept(job):
                        yield job
        except ServiceUnavailableError as err:
            watch.lose(err)
        except ServerBusyError as err:
            job = await ask(calls, calls.messages["get_job"], values)
            if watch.accept(job):
                yield job
            watch.refuse(err)
        if not watch.is_over:
            await calls.transport.wait(watch.delay_s)


REPLIES: Mapping[type[Rpc[..., Any]], Callable[[Calls, RpcMessages, Values], Any]] = {
    Unary: ask,
    Pages: list_all,
    Report: ask_for_report,
}
STREAMS: Mapping[type[Rpc[..., Any]], Callable[[Calls, RpcMessages, Values], Any]] = {
    Stream: read_items,
    Watch: follow,
    States: follow_job,
}
