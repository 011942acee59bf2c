"""Every call of a server belongs to a request: its id in logs and errors, a span, a line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import grpc

from foretoken.app.observed_handler import code_of
from foretoken.wire import trace

_log = logging.getLogger("foretoken.access")


_OK = "OK"
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


class CallLog:
    """Gives every call a request, a span, and a line where that is wanted."""

    def __init__(self, logs: str) -> None:
        """Keep which calls are logged: `off`, `failed` or `all`."""
        self._logs = logs

    @contextmanager
    def observe_call(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Work for a call in a block."""
        call = self._begin(method, context)
        try:
            yield
        finally:
            code = code_of(context)
            call.end(trace.STATUS_CODE, code, is_ok=code == _OK, is_fault=code in _FAULTS)

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
