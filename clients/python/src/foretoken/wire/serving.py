"""The server side that all services share: servicers of the table's lines, registration, errors.

A servicer is an object with one snake-case method per rpc of its proto service; `register_service`
finds them by the service's descriptor, so none can be forgotten.
"""

import functools
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from foretoken.api.types.v1 import measurement_pb2
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.wire import ipc
from foretoken.wire.errors import error_to_status
from foretoken.wire.rpc import (
    ByHand,
    Pages,
    Report,
    Rpc,
    RpcMessages,
    RpcTable,
    States,
    Stream,
    Table,
    Unary,
    Watch,
    messages_of,
)

T = TypeVar("T")

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1_000

_log = logging.getLogger(__name__)


def register_service(server: grpc.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Let a server answer every rpc of a proto service with the servicer's method of that name.

    `ForetokenError`s become their status; anything else is INTERNAL, logged with an id.
    """
    handlers = {method.name: _build_handler(method, servicer) for method in service.methods}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def take_page(
    items: Sequence[T], identity: Callable[[T], str], page_size: int, page_token: str
) -> tuple[Sequence[T], str]:
    """Return a page and the token of the next, which is the identity of the page's last item.

    A token by identity stays right when new items come in front.

    Raises:
        InvalidRequestError: a negative size, or the token's item is gone.

    """
    if page_size < 0:
        raise InvalidRequestError.of_field("page_size", "must not be negative")
    size = min(page_size or _DEFAULT_PAGE_SIZE, _MAX_PAGE_SIZE)
    start = 0
    if page_token:
        start = next((i + 1 for i, item in enumerate(items) if identity(item) == page_token), -1)
        if start < 0:
            raise InvalidRequestError.of_field("page_token", "is stale; begin at the first page")
    page = items[start : start + size]
    return page, identity(page[-1]) if start + size < len(items) else ""


class Servicer:
    """Answers the rpcs of a table with the methods of a port.

    A subclass names its table, and writes by hand what the table says is; it has one method per
    rpc, which takes a message, or an iterator of them, and gRPC's context.
    """

    def __init__(self, port: Any, *, watch_interval_s: float = 0.05) -> None:
        """Keep the port, which is looked at every `watch_interval_s` for the states of a job."""
        self.port = port
        self.watch_interval_s = watch_interval_s

    def __init_subclass__(cls, rpcs: type[RpcTable] | None = None) -> None:
        """Make the methods."""
        super().__init_subclass__()
        if rpcs is None:
            return
        for name, messages in messages_of(rpcs).items():
            if name not in vars(cls) and not isinstance(messages.line, ByHand):
                setattr(cls, name, functools.partialmethod(_ANSWERS[type(messages.line)], messages))


def stream_table(rows: ArrowStream) -> Iterator[measurement_pb2.ArrowChunk]:
    """Yield the messages of a table, which is read as they are taken."""
    for chunk in ipc.write_chunks(rows):
        yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)


def _call(servicer: Servicer, messages: RpcMessages, request: Any) -> Any:
    """Return what the port answers."""
    return getattr(servicer.port, messages.line.name)(*messages.decode_request(request))


def _answer(
    servicer: Servicer, messages: RpcMessages, request: Any, _context: grpc.ServicerContext
) -> Any:
    return messages.encode_reply(_call(servicer, messages, request), request)


def _answer_with_page(
    servicer: Servicer, messages: RpcMessages, request: Any, _context: grpc.ServicerContext
) -> Any:
    items, identify = _call(servicer, messages, request), cast("Any", messages.line).identify
    page, token = take_page(items, identify, request.page_size, request.page_token)
    reply = messages.encode_reply(page, request)
    reply.next_page_token = token
    return reply


def _answer_with_table(
    servicer: Servicer, messages: RpcMessages, request: Any, _context: grpc.ServicerContext
) -> Iterator[Any]:
    return stream_table(_call(servicer, messages, request))


def _answer_with_items(
    servicer: Servicer, messages: RpcMessages, request: Any, _context: grpc.ServicerContext
) -> Iterator[Any]:
    for item in _call(servicer, messages, request):
        yield messages.encode_reply(item, request)


def _answer_with_watch(
    servicer: Servicer, messages: RpcMessages, request: Any, context: grpc.ServicerContext
) -> Iterator[Any]:
    watch = _call(servicer, messages, request)
    # gRPC calls back in a thread of its own, so that a client's leaving ends also the waiting.
    if context.add_callback(watch.close):
        for item in watch:
            yield messages.encode_reply(item, request)


def _answer_with_states(
    servicer: Servicer, messages: RpcMessages, request: Any, context: grpc.ServicerContext
) -> Iterator[Any]:
    # The port's own watch would sleep through the client's leaving.
    is_gone = threading.Event()
    if not context.add_callback(is_gone.set):
        return
    seen: Job | None = None
    while not is_gone.is_set():
        job: Job = servicer.port.get_job(request.job_id)
        if job != seen:
            yield messages.encode_reply(job, request)
            seen = job
        if job.state.is_final:
            return
        is_gone.wait(servicer.watch_interval_s)


_ANSWERS: Mapping[type[Rpc[..., Any]], Callable[..., Any]] = {
    Unary: _answer,
    Report: _answer,
    Pages: _answer_with_page,
    Table: _answer_with_table,
    Stream: _answer_with_items,
    Watch: _answer_with_watch,
    States: _answer_with_states,
}


def _build_handler(method: MethodDescriptor, servicer: object) -> "grpc.RpcMethodHandler[Any, Any]":
    behaviour = getattr(servicer, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
    codecs: dict[str, Any] = {
        "request_deserializer": GetMessageClass(method.input_type).FromString,
        "response_serializer": GetMessageClass(method.output_type).SerializeToString,
    }
    if method.server_streaming:
        streaming = _translate_stream(behaviour)
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(streaming, **codecs)
        return grpc.unary_stream_rpc_method_handler(streaming, **codecs)
    unary = _translate_unary(behaviour)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(unary, **codecs)
    return grpc.unary_unary_rpc_method_handler(unary, **codecs)


def _translate_unary(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behaviour(request, context)
        except grpc.RpcError:
            # The client left while it was read from. gRPC knows its own error again.
            raise
        except Exception as err:  # noqa: BLE001
            # The boundary of the process: every error must become a status.
            _abort(context, err)

    return answer


def _translate_stream(behaviour: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behaviour(request, context)
        except Exception as err:  # noqa: BLE001
            # As above; a client that left has nobody to tell.
            if context.is_active():
                _abort(context, err)

    return answer


def _abort(context: grpc.ServicerContext, err: Exception) -> NoReturn:
    if not isinstance(err, ForetokenError):
        error_id = uuid.uuid4().hex[:12]
        _log.error("error_id=%s unexpected %s", error_id, type(err).__name__, exc_info=err)
        err = ForetokenError(
            f"internal error {error_id}; the service's log says more", error_id=error_id
        )
    context.abort_with_status(error_to_status(err))
