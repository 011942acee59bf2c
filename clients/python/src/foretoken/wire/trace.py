"""Which request a piece of work belongs to, over threads and services: W3C trace context.

The trace id is the id of a request: logs and errors have it, whether spans are recorded or not.
Spans are recorded where a recorder was installed; without one nothing is measured.

Source: https://www.w3.org/TR/trace-context/, the header `traceparent`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol, Self

TRACEPARENT: Final = "traceparent"
# The attribute of a call's span that has the name of its status code.
STATUS_CODE: Final = "rpc.response.status_code"
_TRACE_BYTES, _SPAN_BYTES = 16, 8
_SAMPLED = 1
# Later versions may have more after the flags; version ff is none.
_FORM = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A request, by 32 hexadecimal digits, and a caller within it, by 16.

    `is_sampled` says that the caller records its span.
    """

    trace_id: str
    span_id: str
    is_sampled: bool = False

    @classmethod
    def new(cls) -> Self:
        """Return a request that nobody has asked for yet."""
        return cls(os.urandom(_TRACE_BYTES).hex(), os.urandom(_SPAN_BYTES).hex())

    @classmethod
    def parse(cls, header: str) -> Self | None:
        """Return what a `traceparent` says; None where it is none, as the standard requires."""
        found = _FORM.fullmatch(header)
        # All zeros stand for no id.
        if found is None or not (found["trace"].strip("0") and found["span"].strip("0")):
            return None
        is_sampled = bool(int(found["flags"], 16) & _SAMPLED)
        return cls(found["trace"], found["span"], is_sampled)

    @property
    def traceparent(self) -> str:
        """The header."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


class Kind(Enum):
    """What a span is: a call as its caller or its server sees it, or work in a process."""

    CLIENT = auto()
    SERVER = auto()
    INTERNAL = auto()


class Span(Protocol):
    """Work under way that is recorded, or not."""

    @property
    def context(self) -> TraceContext | None:
        """Whom others are to name who do a part of it; None outside of any request."""

    def set(self, name: str, value: str | float) -> None:
        """Keep an attribute."""

    def end(self, error: str = "") -> None:
        """End it, well or with the reason of an error."""


class Recorder(Protocol):
    """What records spans."""

    def begin(
        self, name: str, kind: Kind, parent: TraceContext | None, attributes: Mapping[str, str]
    ) -> Span:
        """Begin a span, within the parent if there is one."""


class _Unrecorded:
    """Work that is not recorded: whatever is a part of it names its parent."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None) -> None:
        self.context = context

    def set(self, name: str, value: str | float) -> None:
        del name, value

    def end(self, error: str = "") -> None:
        del error


_current: ContextVar[TraceContext | None] = ContextVar("foretoken_trace", default=None)
_recorders: list[Recorder] = []


def install(recorder: Recorder) -> None:
    """Have spans recorded from now on, by this recorder alone."""
    _recorders[:] = [recorder]


def uninstall() -> None:
    """Have no spans recorded from now on."""
    _recorders.clear()


def current() -> TraceContext | None:
    """Return the request that this thread or task works for."""
    return _current.get()


def enter(context: TraceContext | None) -> None:
    """Work for a request until this thread's or task's context ends, or enters another."""
    _current.set(context)


@contextmanager
def entered(context: TraceContext | None) -> Iterator[None]:
    """Work for a request within a block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def begin(
    name: str,
    kind: Kind,
    parent: TraceContext | None = None,
    attributes: Mapping[str, str] | None = None,
) -> Span:
    """Begin a span within a parent, or within the request that this thread works for."""
    parent = parent or _current.get()
    if _recorders:
        return _recorders[0].begin(name, kind, parent, attributes or {})
    return _Unrecorded(parent)


def begin_request(
    name: str,
    kind: Kind,
    parent: TraceContext | None = None,
    attributes: Mapping[str, str] | None = None,
) -> Span:
    """Begin a span where a request enters: within the parent, or as a request of its own."""
    if _recorders:
        return _recorders[0].begin(name, kind, parent, attributes or {})
    return _Unrecorded(parent or TraceContext.new())


@contextmanager
def span(name: str, attributes: Mapping[str, str] | None = None) -> Iterator[Span]:
    """Do a piece of work, and what others do for it, as a span of its own."""
    found = begin(name, Kind.INTERNAL, attributes=attributes)
    error = ""
    try:
        with entered(found.context):
            yield found
    except BaseException as err:
        error = getattr(err, "reason", "") or type(err).__name__
        raise
    finally:
        found.end(error)


def describe_call(method: str) -> tuple[str, Mapping[str, str]]:
    """Return the name and the attributes of a call's span, by the full name of its method."""
    # Of OpenTelemetry's semantic conventions 1.39.
    name = method.removeprefix("/")
    return name, {"rpc.system.name": "grpc", "rpc.method": name}


def headers_of(found: Span) -> tuple[tuple[str, str], ...] | None:
    """Return the metadata by which whoever is called knows the request; None outside of any."""
    return None if found.context is None else ((TRACEPARENT, found.context.traceparent),)
