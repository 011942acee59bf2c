"""Errors as HTTP has them: a status, and a problem document (RFC 9457)."""

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Final

import grpc
from aiohttp import web

from foretoken.domain.errors import (
    ForetokenError,
    InvalidRequestError,
    ServerBusyError,
    StorageFullError,
)
from foretoken.wire import trace
from foretoken.wire.errors import STATUS_BY_ERROR
from foretoken.wire.message_json import MessageType, name_as_written

_log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
# As google.rpc.Code has them, but for what depends on a state, which is a conflict here.
_HTTP_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.CANCELLED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_NO_BODY, _INTERNAL, _NO_ROOM = 400, 500, 507


class HttpRefusal(Exception):  # noqa: N818 - an answer, not a fault of ours
    """What HTTP itself refuses, before there is a call."""

    def __init__(self, status: int, reason: str, detail: str) -> None:
        """Keep the status, a stable reason and what to do."""
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.detail = detail


def describe_problem(error: Exception, request: MessageType | None = None) -> dict[str, Any]:
    """Return the document of an error; fields are named as the request's message has them."""
    if isinstance(error, web.RequestPayloadError):
        error = HttpRefusal(_NO_BODY, "BODY", f"the body cannot be read: {error}")
    if isinstance(error, HttpRefusal):
        return {"status": error.status, "reason": error.reason, "detail": error.detail}
    if not isinstance(error, ForetokenError):
        error_id = uuid.uuid4().hex[:12]
        _log.error("error_id=%s unexpected %s", error_id, type(error).__name__, exc_info=error)
        error = ForetokenError(
            f"internal error {error_id}; the service's log says more", error_id=error_id
        )
    code = next(STATUS_BY_ERROR[cls] for cls in type(error).__mro__ if cls in STATUS_BY_ERROR)
    document: dict[str, Any] = {
        "status": _status_of(error, code),
        "reason": error.reason,
        "detail": error.message,
    }
    if isinstance(error, InvalidRequestError) and error.violations:
        document["errors"] = [
            {
                "field": name_as_written(violation.field, request) if request else violation.field,
                "detail": violation.description,
            }
            for violation in error.violations
        ]
        # The message names fields as the domain does.
        document["detail"] = "; ".join(
            f"{found['field']}: {found['detail']}" for found in document["errors"]
        )
    if error.details:
        document["details"] = {key: str(value) for key, value in error.details.items()}
    if isinstance(error, ServerBusyError):
        document["retry_after_s"] = error.retry_after_s
    return document


def _status_of(error: ForetokenError, code: grpc.StatusCode) -> int:
    # Asking again later, as the status of gRPC invites to, would not help.
    is_full = isinstance(error, StorageFullError)
    return _NO_ROOM if is_full else _HTTP_STATUS.get(code, _INTERNAL)


def answer_problem(error: Exception, request: MessageType | None = None) -> web.Response:
    """Return the answer that an error is."""
    document = describe_problem(error, request)
    if (work := trace.current()) is not None:
        document["trace_id"] = work.trace_id
    answer = web.Response(
        status=document["status"],
        text=json.dumps(document, ensure_ascii=False) + "\n",
        content_type=MEDIA_TYPE,
    )
    if "retry_after_s" in document:
        answer.headers["Retry-After"] = f"{max(1, round(document['retry_after_s']))}"
    if document["status"] == _HTTP_STATUS[grpc.StatusCode.UNAUTHENTICATED]:
        answer.headers["WWW-Authenticate"] = 'Bearer realm="foretoken"'
    return answer
