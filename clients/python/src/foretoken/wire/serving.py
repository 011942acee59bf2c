"""The server side that all services share: registration, error translation, jobs, pages.

A servicer is a plain object with one snake-case method per rpc of its proto service;
`register_service` finds them by the service's descriptor, so none can be forgotten.
"""

import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from foretoken.api.types.v1 import job_pb2
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.job import Job
from foretoken.domain.ports import JobsPort
from foretoken.domain.watch import Watch
from foretoken.wire import codec
from foretoken.wire.errors import error_to_status

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


class JobRpcs:
    """The job rpcs of a service, over its port."""

    def __init__(self, jobs: JobsPort, *, watch_interval_s: float = 0.05) -> None:
        """Keep the port, which is looked at every `watch_interval_s` for a watch."""
        self._jobs = jobs
        self._watch_interval_s = watch_interval_s

    def get_job(self, request: job_pb2.GetJobRequest, _context: grpc.ServicerContext) -> Any:
        """Return a job now."""
        return codec.encode(self._jobs.get_job(request.job_id), job_pb2.Job)

    def list_jobs(self, request: job_pb2.ListJobsRequest, _context: grpc.ServicerContext) -> Any:
        """Return a page of jobs, newest first."""
        page, token = take_page(
            self._jobs.list_jobs(), lambda job: job.job_id, request.page_size, request.page_token
        )
        jobs = [codec.encode(job, job_pb2.Job) for job in page]
        return job_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    def watch_job(
        self, request: job_pb2.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[job_pb2.Job]:
        """Stream a job's states until it is final or the client is gone."""
        # The port's own watch would sleep through the client's leaving.
        is_gone = threading.Event()
        if not context.add_callback(is_gone.set):
            return
        seen: Job | None = None
        while not is_gone.is_set():
            job = self._jobs.get_job(request.job_id)
            if job != seen:
                yield codec.encode(job, job_pb2.Job)
                seen = job
            if job.state.is_final:
                return
            is_gone.wait(self._watch_interval_s)

    def hand_on(self, watch: Watch[T], context: grpc.ServicerContext) -> Iterator[T]:
        """Yield what comes until the end, or until the client is gone."""
        # gRPC calls back in a thread of its own, so that a client's leaving ends also the waiting.
        if context.add_callback(watch.close):
            yield from watch

    def cancel_job(self, request: job_pb2.CancelJobRequest, _context: grpc.ServicerContext) -> Any:
        """Ask a job to stop."""
        return codec.encode(self._jobs.cancel_job(request.job_id), job_pb2.Job)


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
