"""What watches calls: each handler of our services is wrapped once, with all that observes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Gives the block of a call, by the full name of its method; it learns its status at its end.
Observer: TypeAlias = Callable[[str, grpc.ServicerContext], AbstractContextManager[None]]

_OWN = "/foretoken.api."


class ObservedCalls(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Observes the calls of our own services; the first of the interceptors, so as to see all."""

    def __init__(self, *observers: Observer) -> None:
        """Keep what observes calls, the outermost first."""
        self._observers = observers
        # Interceptors are asked at every call; a method has its own handler and those that refuse.
        self._wrapped: dict[tuple[str, Handler], Handler] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the method's handler; probes and reflection pass as they are."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OWN):
            return handler
        key = method, handler
        if key not in self._wrapped:
            self._wrapped[key] = self._wrap(handler, method)
        return self._wrapped[key]

    def _wrap(self, handler: Handler, method: str) -> Handler:
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                build = getattr(grpc, f"{kind}_rpc_method_handler")
                wrap = self._stream if kind.endswith("_stream") else self._unary
                wrapped: Handler = build(
                    wrap(behaviour, method),
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return wrapped
        return handler

    def _unary(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        # With what says in which threads it runs.
        @functools.wraps(behaviour)
        def observed(request: Any, context: grpc.ServicerContext) -> Any:
            with self._observe(method, context):
                return behaviour(request, context)

        return observed

    def _stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        @functools.wraps(behaviour)
        def observed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._observe(method, context):
                yield from behaviour(request, context)

        return observed

    def _observe(self, method: str, context: grpc.ServicerContext) -> ExitStack:
        with ExitStack() as undo:
            for observe in self._observers:
                undo.enter_context(observe(method, context))
            return undo.pop_all()


def code_of(context: Any) -> str:
    """Return the status of a call that ends."""
    code = context.code()
    return code.name if code is not None else "OK"
