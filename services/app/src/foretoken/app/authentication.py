"""Who may call a server: those who show its token."""

import hmac
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias

import grpc

from foretoken.domain.errors import InvalidRequestError, UnauthenticatedError
from foretoken.wire.errors import error_to_status

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

_SCHEME = "Bearer "
# Probes and balancers ask for it, and they have no token.
_OPEN_SERVICE = "/grpc.health.v1.Health/"


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the token, all but those for the server's health."""

    def __init__(self, token: str) -> None:
        """Keep the token."""
        self._token = token.encode()

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the check for the token in a file; space around it does not count.

        Raises:
            InvalidRequestError: the file cannot be read or is empty.

        """
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as err:
            reason = err.strerror if isinstance(err, OSError) else "it is not text"
            raise InvalidRequestError.of_field(
                "server.token_file", f"cannot read {path}: {reason}"
            ) from err
        if not token:
            raise InvalidRequestError.of_field("server.token_file", f"{path} is empty")
        return cls(token)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        handler = continuation(handler_call_details)
        is_open = handler_call_details.method.startswith(_OPEN_SERVICE)
        # A method that does not exist stays so: an answer of ours would make it one, and every name
        # that anybody makes up a series of the metrics.
        if handler is None or is_open or self._is_known(handler_call_details):
            return handler
        # On the wire a single message is a stream of one, so this refuses every kind of call.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        shown = dict(details.invocation_metadata or ()).get("authorization", "")
        text = shown if isinstance(shown, str) else shown.decode("utf-8", errors="replace")
        is_bearer = text.startswith(_SCHEME)
        token = text.removeprefix(_SCHEME).encode()
        # In constant time, so that answers do not tell how much of a guess was right.
        return hmac.compare_digest(token, self._token) and is_bearer


def _refuse(_requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    error = UnauthenticatedError(
        "this service wants a token: name the file that holds it in client.token_file"
    )
    context.abort_with_status(error_to_status(error))
    yield
