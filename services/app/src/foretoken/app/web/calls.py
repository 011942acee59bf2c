"""Calls of rpcs from requests over HTTP, in threads, each method within its budget.

The servicers are those of gRPC: pages, watches that end with their caller, refusals are theirs.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from google.protobuf.message import Message

from foretoken.app.access import Access
from foretoken.app.admission import budget_of
from foretoken.app.config import ServerConfig
from foretoken.app.lane import Lane
from foretoken.domain.errors import InvalidRequestError, ServerBusyError
from foretoken.domain.measurements.measurement import ArrowStream, SqlQuery
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire.rpc import RpcMessages, RpcTable, messages_of
from foretoken.wire.rpcs import TABLES
from foretoken.wire.serving import Servicer

T = TypeVar("T")
_TABLES: Mapping[str, type[RpcTable]] = {table.short_name(): table for table in TABLES}


class OfferedServices:
    """The ports that a web server answers for, each opened when it is first asked for."""

    def __init__(self, names: tuple[str, ...], ports: object, starter: str = "") -> None:
        """Keep their names, what has them as attributes, and where a starter catalog lies."""
        self.names = names
        self.starter = starter
        self._ports = ports
        self._servicers: dict[str, Servicer] = {}
        # Opening one takes seconds, and several may be asked for at once.
        self._lock = threading.RLock()

    def port(self, name: str) -> Any:
        """Return a service.

        Raises:
            InvalidRequestError: this server does not answer for it.

        """
        if name not in self.names:
            raise InvalidRequestError.of_field(
                "service", f"{name} is not served here, but {', '.join(self.names)}"
            )
        with self._lock:
            return getattr(self._ports, name)

    def is_open(self, name: str) -> bool:
        """Return whether a service was asked for already, or is what every page needs."""
        return name in ("catalog", "simulator") or name in vars(self._ports)

    def servicer(self, name: str) -> Servicer:
        """Return what answers the messages of a service's rpcs."""
        with self._lock:
            if name not in self._servicers:
                port = self.port(name)
                module: Any = import_module(f"foretoken.{name}.servicer")
                if name == "catalog" and not hasattr(port, "open"):
                    port = _LeftCatalog(port)
                self._servicers[name] = getattr(module, f"{name.capitalize()}Servicer")(port)
            return self._servicers[name]


class _LeftCatalog:
    """A catalog elsewhere: a query of whose caller leaves is ended when its rows are dropped."""

    def __init__(self, catalog: CatalogAdminPort) -> None:
        self._catalog = catalog

    def query_sql(self, query: SqlQuery, _on_leave: object = None) -> ArrowStream:
        return self._catalog.query_sql(query)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


class CallContext:
    """What servicers ask of a call: whether its caller is still there, and a call when not."""

    def __init__(self) -> None:
        """Begin with a caller who is there."""
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._is_over = False

    def is_active(self) -> bool:
        """Return whether the caller waits for the answer."""
        return not self._is_over

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Have something called when the call is over, if it is not yet."""
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
            return not self._is_over

    def leave(self) -> None:
        """End the call."""
        with self._lock:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the names it is known by, and where it is."""

    names: tuple[str, ...]
    peer: str


class Calls:
    """Runs calls in threads: as many of a method at once, and waiting, as gRPC would."""

    def __init__(self, config: ServerConfig, access: Access, offered: OfferedServices) -> None:
        """Keep who is asked."""
        self.offered = offered
        self.access = access
        self.idle_s = config.stream_idle_s
        self._config = config
        self._lanes: dict[str, Lane] = {}
        self._streams: set[CallContext] = set()

    def end_streams(self) -> None:
        """End what is being streamed: whoever watches goes on with another server."""
        for context in tuple(self._streams):
            context.leave()

    def close(self) -> None:
        """Make no more threads."""
        for lane in self._lanes.values():
            lane.pool.shutdown(wait=False, cancel_futures=True)

    def lanes(self) -> Mapping[str, Lane]:
        """Return the threads of methods and pages, by `web/METHOD`."""
        return {f"web/{method}": lane for method, lane in self._lanes.copy().items()}

    async def answer(self, messages: RpcMessages, caller: Caller, request: Any) -> Message:
        """Return the reply to one message, or to an iterator of them."""

        def call() -> Message:
            with self.access.enter(messages.path, caller.names, caller.peer):
                reply: Message = self._method(messages)(request, CallContext())
                return reply

        return await self.run(messages.line.rpc_name, call)

    async def stream(
        self,
        messages: RpcMessages,
        caller: Caller,
        request: Any,
        shape: Callable[[Iterator[Any]], Iterator[T]],
        take: Callable[[T], Awaitable[None]],
    ) -> None:
        """Hand on the replies to one message, or to an iterator, in the shape they are sent in.

        `take` is awaited for each; the next is worked on when it was taken.
        """
        context, loop = CallContext(), asyncio.get_running_loop()

        def call() -> None:
            with self.access.enter(messages.path, caller.names, caller.peer):
                for item in shape(self._method(messages)(request, context)):
                    if not context.is_active():
                        return
                    asyncio.run_coroutine_threadsafe(_await(take, item), loop).result()

        self._streams.add(context)
        try:
            await self.run(messages.line.rpc_name, call)
        finally:
            self._streams.discard(context)
            context.leave()

    async def run(self, method: str, work: Callable[[], T]) -> T:
        """Do something in a thread of a method.

        Raises:
            ServerBusyError: as much of the method is being done as may be.

        """
        lane = self._lane(method)
        if not lane.enter():
            raise ServerBusyError(
                f"{method}: {lane.describe()}; try again later", self._config.retry_after_s
            )

        def do() -> T:
            try:
                return work()
            finally:
                lane.leave()

        # In the context of the request.
        return await asyncio.get_running_loop().run_in_executor(lane.pool, copy_context().run, do)

    def _lane(self, method: str) -> Lane:
        if method not in self._lanes:
            holds_thread = method.startswith("Watch") or method in ("Record", "StoreArtifact")
            queued = 0 if holds_thread else self._config.max_queued_calls
            self._lanes[method] = Lane(method, budget_of(self._config, method), queued)
        return self._lanes[method]

    def _method(self, messages: RpcMessages) -> Callable[..., Any]:
        service = messages.path.split(".")[2]
        found: Callable[..., Any] = getattr(self.offered.servicer(service), messages.line.name)
        return found


async def _await(take: Callable[[T], Awaitable[None]], item: T) -> None:
    await take(item)


def rpcs_of(service: str) -> Mapping[str, RpcMessages]:
    """Return how the rpcs of a service travel, by name."""
    return messages_of(_TABLES[service])
