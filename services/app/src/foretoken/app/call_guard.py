"""Calls as clients may send them: bytes that are no message, and streams over which nothing comes.

To gRPC, every guarded method takes a stream of bytes. So they are decoded here, in the thread of
the call; gRPC would do it in its one thread for all events, and log a traceback where it fails. And
waiting for them ends: gRPC waits for the message of a call as long as the client says nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from foretoken.app.lane import LargeCalls
from foretoken.domain.call_scope import call_scope
from foretoken.domain.errors import ForetokenError, InvalidRequestError, StreamIdleError
from foretoken.wire.errors import error_to_status

_TICK_S = 0.5
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# Lets a call of a method run, or raises.
Admit: TypeAlias = Callable[[str, grpc.ServicerContext], AbstractContextManager[None]]

_END = object()


class TimeLimits:
    """Does something about what has not ended in time, up to half a second late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing that is watched."""
        self._clock = clock
        self._watched: dict[object, tuple[float, Callable[[], object]]] = {}
        self._is_closed = threading.Event()

    def open(self) -> None:
        """Look at the clock now and then, in a thread of its own."""
        threading.Thread(target=self._look_on, name="time limits", daemon=True).start()

    def close(self) -> None:
        """End that thread."""
        self._is_closed.set()

    @contextmanager
    def act_after(self, limit_s: float, action: Callable[[], object]) -> Iterator[None]:
        """Do the action, once and in another thread, where the block takes longer."""
        key = object()
        self._watched[key] = (self._clock() + limit_s, action)
        try:
            yield
        finally:
            self._watched.pop(key, None)

    def act(self) -> None:
        """Do what is due."""
        now = self._clock()
        # Of a copy, which is made in one piece: blocks begin and end meanwhile.
        for key, (due, action) in self._watched.copy().items():
            if now >= due and self._watched.pop(key, None) is not None:
                action()

    def _look_on(self) -> None:
        while not self._is_closed.wait(_TICK_S):
            self.act()


class MessageReader:
    """Reads a stream of gRPC's in a thread of its own, for its iterator waits without an end.

    One message is read ahead. The thread ends with the call.
    """

    def __init__(
        self,
        messages: Iterator[Any],
        decode: Callable[[Any], Any],
        *,
        first_s: float,
        idle_s: float,
    ) -> None:
        """Keep what is read, and how long to wait for the first message and for another."""
        self._messages = messages
        self._decode = decode
        self._limit_s = first_s
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._arrived: list[Any] = []
        self._error: BaseException | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        """Begin to read."""
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Want no more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next message.

        Raises:
            StreamIdleError: none came in time.
            InvalidRequestError: what came is no message.

        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived or self._is_over, self._limit_s):
                raise StreamIdleError(
                    f"the stream is ended, for nothing came over it for {self._limit_s:g} s;"
                    " open another when there is something to send"
                )
            self._limit_s = self._idle_s
            if self._arrived:
                self._changed.notify_all()
                return self._decode(self._arrived.pop())
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _read(self) -> None:
        try:
            for message in self._messages:
                with self._changed:
                    self._changed.wait_for(lambda: not self._arrived or self._is_over)
                    if self._is_over:
                        return
                    self._arrived.append(message)
                    self._changed.notify_all()
        except Exception as err:  # noqa: BLE001
            # What gRPC raises where the client left: whoever takes the messages is to hear of it.
            self._error = err
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a call's first message may take, and how long a stream may be silent, in s."""

    first_message_s: float
    idle_s: float


class CallGuard:
    """Makes guarded handlers of handlers."""

    def __init__(
        self,
        patience: Patience,
        limits: TimeLimits,
        admit: Admit,
        count_undecodable: Callable[[str], None],
    ) -> None:
        """Keep who lets calls run, and what counts the messages that cannot be decoded."""
        self.admit = admit
        self._patience = patience
        self._limits = limits
        self._count_undecodable = count_undecodable

    def guard(
        self,
        method: str,
        handler: Handler,
        leave: Callable[[], None],
        large: LargeCalls | None = None,
    ) -> Handler:
        """Return the same method over a stream of bytes; `leave` is called when a call is over.

        Calls that are answered once wait for a place where they are `large`.
        """
        call = _Call(self, method, handler, leave, large)
        if handler.response_streaming:
            is_handed_on = getattr(call.behaviour, "experimental_non_blocking", False)
            return grpc.stream_stream_rpc_method_handler(
                call.hand_on if is_handed_on else call.answer_with_stream,
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            call.answer, response_serializer=handler.response_serializer
        )

    def open_requests(
        self, call: "_Call", messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> AbstractContextManager[Any]:
        """Return what a method is handed: its request, or the stream of its requests."""
        if call.handler.request_streaming:
            return MessageReader(
                messages,
                call.decode,
                first_s=self._patience.first_message_s,
                idle_s=self._patience.idle_s,
            )
        with self._limits.act_after(self._patience.first_message_s, context.cancel):
            message = next(messages, None)
        if message is None:
            raise InvalidRequestError(f"{call.method} takes one message, and none came")
        return nullcontext(call.decode(message))

    def pace(self, responses: Iterator[Any], context: "_WatchedContext") -> Iterator[Any]:
        """Yield what is answered, as long as there are answers and somebody takes them.

        Raises:
            StreamIdleError: there was none for so long.

        """
        idle_s = self._patience.idle_s
        while True:
            with self._limits.act_after(idle_s, context.end):
                response = next(responses, _END)
            if response is _END:
                break
            # A client that reads no more reads no error either.
            with self._limits.act_after(idle_s, context.cancel):
                yield response
        if context.is_ended:
            raise StreamIdleError(
                f"the stream is ended, for there was no news for {idle_s:g} s; open another"
            )

    def decode(self, method: str, deserialize: Callable[[bytes], Any], message: bytes) -> Any:
        """Return the message that bytes stand for.

        Raises:
            InvalidRequestError: they stand for none.

        """
        try:
            return deserialize(message)
        except DecodeError:
            self._count_undecodable(method)
            raise InvalidRequestError(
                f"{len(message)} bytes were sent to {method} that are no message of its kind;"
                " is the client of the same version?"
            ) from None


class _Call:
    """One method: what it is, and how its calls are answered."""

    def __init__(
        self,
        guard: CallGuard,
        method: str,
        handler: Handler,
        leave: Callable[[], None],
        large: LargeCalls | None,
    ) -> None:
        self.method = method
        self.handler = handler
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        behaviours = (getattr(handler, kind) for kind in kinds)
        self.behaviour: Callable[..., Any] = next(one for one in behaviours if one is not None)
        # One without takes the bytes as they are.
        self._deserialize: Callable[[bytes], Any] = handler.request_deserializer or bytes
        self._guard = guard
        self._leave = leave
        self._large = large

    def decode(self, message: bytes) -> Any:
        return self._guard.decode(self.method, self._deserialize, message)

    def answer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        try:
            with (
                self._guard.admit(self.method, context),
                call_scope(context.time_remaining(), context.is_active),
                self._guard.open_requests(self, messages, context) as requests,
                self._place_for(requests, context),
            ):
                return self.behaviour(requests, context)
        except ForetokenError as err:
            context.abort_with_status(error_to_status(err))
        finally:
            self._leave()

    def _place_for(
        self, request: Any, context: grpc.ServicerContext
    ) -> AbstractContextManager[None]:
        if self._large is None:
            return nullcontext()
        return self._large.admit(request, context.is_active)

    def answer_with_stream(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        watched = _WatchedContext(context)
        try:
            with (
                self._guard.admit(self.method, context),
                call_scope(context.time_remaining(), context.is_active),
                self._guard.open_requests(self, messages, context) as requests,
                closing(self.behaviour(requests, watched)) as responses,
            ):
                yield from self._guard.pace(responses, watched)
        except ForetokenError as err:
            context.abort_with_status(error_to_status(err))
        finally:
            self._leave()

    def hand_on(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[..., None]
    ) -> None:
        """Answer as health's `Watch` does, which gives the thread back and is called later."""
        try:
            with (
                self._guard.admit(self.method, context),
                self._guard.open_requests(self, messages, context) as request,
            ):
                self.behaviour(request, context, send)
        except ForetokenError as err:
            context.abort_with_status(error_to_status(err))
        finally:
            self._leave()

    hand_on.experimental_non_blocking = True  # type: ignore[attr-defined]


class _WatchedContext:
    """A call's context; what is to be done at its end can also be done before."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._callbacks: list[Callable[[], None]] = []
        self.is_ended = False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return self._context.add_callback(callback)

    def end(self) -> None:
        """Let a watch end; an answer that is being worked on has no callback and goes on."""
        self.is_ended = bool(self._callbacks)
        for callback in self._callbacks:
            callback()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
