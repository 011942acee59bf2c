"""Every call of a server belongs to a request: its id in logs and errors, a span, a line."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import grpc

from foretoken.app.observed_handler import Handler, observe_handler
from foretoken.wire import trace

_log = logging.getLogger("foretoken.access")


_OK = "OK"
_OWN = "/foretoken.api."
# Codes that are errors of a server's span, by OpenTelemetry's conventions for gRPC.
_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
# What of calls is logged: nothing, those that did not end well, all.
OFF, FAILED, ALL = "off", "failed", "all"
# A header that is longer is none of ours, nor any of the standard's.
_LONGEST_HEADER = 512


class ObservedCall:
    """One call: what it is, who makes it, and since when."""

    def __init__(self, span: trace.Span, what: str, peer: str, logs: str) -> None:
        """Begin a call; `what` it is stands first in its line, which it has by `logs`."""
        self._span = span
        self._what = what
        self._peer = peer
        self._logs = logs
        self._start_s = time.perf_counter()
        self.caller = ""

    def enter(self) -> None:
        """Let this thread's or task's context work for the call."""
        trace.enter(self._span.context)
        _call.set(self)

    @property
    def trace_id(self) -> str:
        """The id of the request."""
        return self._span.context.trace_id if self._span.context is not None else ""

    def end(self, attribute: str, code: str | int, *, is_ok: bool, is_fault: bool) -> None:
        """End the call with a status, in a context that works for it.

        Of those that are not ok some are a fault of the server's, and an error of its span.
        """
        if self.caller:
            self._span.set("enduser.id", self.caller)
        self._span.set(attribute, code)
        self._span.end(str(code) if is_fault else "")
        if self._logs == ALL or (self._logs == FAILED and not is_ok):
            _log.info(
                "%s code=%s seconds=%.6f caller=%s peer=%s",
                self._what,
                code,
                time.perf_counter() - self._start_s,
                self.caller or "-",
                self._peer,
            )


_call: ContextVar[ObservedCall | None] = ContextVar("foretoken_call", default=None)


def note_caller(name: str) -> None:
    """Say who makes the call that this thread works for."""
    if (call := _call.get()) is not None:
        call.caller = name


class CallLog(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Observes the calls of our own services; the first of the interceptors, so as to see all."""

    def __init__(self, logs: str) -> None:
        """Keep which calls are logged: `off`, `failed` or `all`."""
        self._logs = logs
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
        return observe_handler(
            handler,
            lambda behaviour: self._unary(behaviour, method),
            lambda behaviour: self._stream(behaviour, method),
        )

    def _unary(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        # With what says in which threads it runs.
        @functools.wraps(behaviour)
        def observed(request: Any, context: grpc.ServicerContext) -> Any:
            call = self._begin(method, context)
            try:
                return behaviour(request, context)
            finally:
                _end(call, context)

        return observed

    def _stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        @functools.wraps(behaviour)
        def observed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            call = self._begin(method, context)
            try:
                yield from behaviour(request, context)
            finally:
                _end(call, context)

        return observed

    def _begin(self, method: str, context: grpc.ServicerContext) -> ObservedCall:
        metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        header = next((value for key, value in metadata if key == trace.TRACEPARENT), "")
        name, attributes = trace.describe_call(method)
        span = trace.begin_request(name, trace.Kind.SERVER, read_parent(str(header)), attributes)
        call = ObservedCall(span, f"rpc={name}", context.peer(), self._logs)
        # gRPC runs every call in a context of its own, which ends with it.
        call.enter()
        return call


def read_parent(header: str) -> trace.TraceContext | None:
    """Return the request that a caller names, if it does."""
    return trace.TraceContext.parse(header[:_LONGEST_HEADER])


def _end(call: ObservedCall, context: Any) -> None:
    code = context.code()
    name = code.name if code is not None else _OK
    call.end(trace.STATUS_CODE, name, is_ok=name == _OK, is_fault=name in _FAULTS)
