"""Errors of the domain to gRPC status and back: the one table of codes.

An error travels as its status code, its message and an `ErrorInfo` whose reason selects the class
again on the other side; field violations travel as a `BadRequest`, the delay after which a busy
server may be asked again as a `RetryInfo`, the id of the request as a `RequestInfo`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from foretoken.domain import errors
from foretoken.domain.errors import FieldViolation, ForetokenError, InvalidRequestError
from foretoken.wire import trace

ERROR_DOMAIN = "foretoken"

STATUS_BY_ERROR: Mapping[type[ForetokenError], grpc.StatusCode] = {
    errors.ForetokenError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownOperatorError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownDeviceError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownTopologyError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownModelError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownPluginError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownDatasetError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownJobError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownModelVersionError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownCorrectionError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownMeasurementError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownArtifactError: grpc.StatusCode.NOT_FOUND,
    errors.DatasetExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotTrainedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.JobNotFinishedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeviceNotPresentError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ImplausibleTimingError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfCoverageError: grpc.StatusCode.OUT_OF_RANGE,
    errors.DeviceMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ServerBusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SearchTooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CatalogBusyError: grpc.StatusCode.UNAVAILABLE,
    errors.ServiceUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.StreamIdleError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StorageFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueryLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SnapshotInUseError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ArtifactInUseError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RunConflictError: grpc.StatusCode.ABORTED,
    errors.CorruptCatalogError: grpc.StatusCode.DATA_LOSS,
    errors.IncompleteCatalogError: grpc.StatusCode.DATA_LOSS,
    errors.CancelledJobError: grpc.StatusCode.CANCELLED,
    errors.InterruptedJobError: grpc.StatusCode.ABORTED,
    errors.JobLeaseError: grpc.StatusCode.ABORTED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
}

_ERROR_BY_REASON = {cls.reason: cls for cls in STATUS_BY_ERROR}

# What a status without an `ErrorInfo` means: it comes from gRPC itself, not from a service.
_PLAIN_ERRORS: Mapping[grpc.StatusCode, tuple[type[ForetokenError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        errors.ServiceUnavailableError,
        "cannot be reached; check the address and that it serves there",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        errors.ServiceUnavailableError,
        "did not answer in time; retry, or raise the deadline",
    ),
    grpc.StatusCode.CANCELLED: (
        errors.ServiceUnavailableError,
        "ended the call, as a service does that stops; retry",
    ),
    grpc.StatusCode.UNAUTHENTICATED: (
        errors.UnauthenticatedError,
        "wants to know who you are; give a token or a certificate",
    ),
    grpc.StatusCode.PERMISSION_DENIED: (errors.NotAllowedError, "does not allow you that"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        InvalidRequestError,
        "a message is too large or too many calls wait; ask for less at once",
    ),
    grpc.StatusCode.UNIMPLEMENTED: (
        ForetokenError,
        "does not know this call; another service or an older version is at that address",
    ),
}

# HTTP/2 peers refuse more than 8 KiB of trailers. The message travels in them twice, once with
# every byte beyond ASCII written as three.
_MAX_MESSAGE_BYTES = 3_500
_MAX_METADATA_BYTES = 1_500
_MAX_VIOLATIONS_BYTES = 2_000
_MAX_VALUE_BYTES = 500


def error_to_status(error: ForetokenError) -> grpc.Status:
    """Return the status an error travels as; overlong messages and details are cut."""
    code = next(STATUS_BY_ERROR[cls] for cls in type(error).__mro__ if cls in STATUS_BY_ERROR)
    message = _cut(error.message, _MAX_MESSAGE_BYTES, lambda char: len(quote(char)) + _size(char))
    details = [_pack(_error_info(error))]
    if isinstance(error, InvalidRequestError) and error.violations:
        details.append(_pack(_bad_request(error.violations)))
    if isinstance(error, errors.ServerBusyError):
        details.append(_pack(_retry_info(error.retry_after_s)))
    if (request := trace.current()) is not None:
        details.append(_pack(error_details_pb2.RequestInfo(request_id=request.trace_id)))
    status = status_pb2.Status(code=code.value[0], message=message, details=details)
    return rpc_status.to_status(status)


def rpc_to_error(error: grpc.RpcError, peer: str) -> ForetokenError:
    """Return the error that a failed call to `peer` ("predictor at dns:///...") stands for."""
    # What gRPC raises is the call too; its base class does not say so.
    call = cast("grpc.Call", error)
    try:
        status = rpc_status.from_call(call)
    except ValueError:
        # gRPC overruled the service's status; what it says itself then counts.
        status = None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return _rebuild(status, info)
    return _plain_error(call.code(), call.details() or "", peer)


def _rebuild(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> ForetokenError:
    cls = _ERROR_BY_REASON.get(info.reason)
    if cls is None:
        # A newer service: its reason stays readable.
        error = ForetokenError(f"{info.reason}: {status.message}")
    elif issubclass(cls, InvalidRequestError):
        error = cls(status.message, tuple(_violations(status)))
    elif issubclass(cls, errors.ServerBusyError):
        error = cls(status.message, _retry_after_s(status))
    else:
        error = cls(status.message)
    error.details = dict(info.metadata)
    error.trace_id = _trace_id(status)
    return error


# What gRPC's asyncio client says when the other side ends a stream that it still writes to; the
# status itself is lost then.
_BROKEN_STREAM = "Internal error from Core"


def _plain_error(code: grpc.StatusCode, details: str, peer: str) -> ForetokenError:
    if details == _BROKEN_STREAM:
        code = grpc.StatusCode.CANCELLED
    cls, explanation = _PLAIN_ERRORS.get(code, (ForetokenError, f"{code.name}; try again"))
    message = f"{peer}: {explanation}"
    error = cls(f"{message} ({details})" if details else message)
    if isinstance(error, errors.ServiceUnavailableError):
        error.details = {"peer": peer}
    return error


def _error_info(error: ForetokenError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    for key, value in error.details.items():
        info.metadata[key] = _cut(str(value), _MAX_VALUE_BYTES)
        if info.ByteSize() > _MAX_METADATA_BYTES:
            del info.metadata[key]
            break
    return info


def _bad_request(violations: Sequence[FieldViolation]) -> error_details_pb2.BadRequest:
    message = error_details_pb2.BadRequest()
    for violation in violations:
        message.field_violations.add(
            field=_cut(violation.field, _MAX_VALUE_BYTES),
            description=_cut(violation.description, _MAX_VALUE_BYTES),
        )
        if message.ByteSize() > _MAX_VIOLATIONS_BYTES:
            del message.field_violations[-1]
            break
    return message


def _violations(status: status_pb2.Status) -> Iterator[FieldViolation]:
    for detail in status.details:
        message = error_details_pb2.BadRequest()
        if detail.Unpack(message):
            for violation in message.field_violations:
                yield FieldViolation(violation.field, violation.description)


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(delay_s * 1_000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _retry_after_s(status: status_pb2.Status) -> float:
    message = error_details_pb2.RetryInfo()
    delays = [
        message.retry_delay.ToMilliseconds() / 1_000
        for detail in status.details
        if detail.Unpack(message)
    ]
    return max(delays, default=0.0)


def _trace_id(status: status_pb2.Status) -> str:
    message = error_details_pb2.RequestInfo()
    ids = [message.request_id for detail in status.details if detail.Unpack(message)]
    return ids[0] if ids else ""


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _size(text: str) -> int:
    return len(text.encode("utf-8", errors="replace"))


def _cut(text: str, max_bytes: int, size_of: Callable[[str], int] = _size) -> str:
    total = 0
    for index, char in enumerate(text):
        total += size_of(char)
        if total > max_bytes:
            return f"{text[:index]} ..."
    return text
