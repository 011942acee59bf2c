"""A connection to a service: its options, its deadlines, and errors as the domain's own."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import grpc

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.refusals import Refusals
from foretoken.domain.errors import InvalidRequestError, ServerBusyError
from foretoken.wire.errors import rpc_to_error
from foretoken.wire.keepalive import client_options
from foretoken.wire.rpcs import TABLES

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
Q = TypeVar("Q")

_RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.2s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


class PageRequest(Protocol):
    """A request for a page of a list."""

    page_token: str


class Page(Protocol):
    """A page of a list; without a token it is the last."""

    @property
    def next_page_token(self) -> str:
        """What the next page is asked for with."""


PageQ = TypeVar("PageQ", bound=PageRequest)
PageA = TypeVar("PageA", bound=Page)


class ServerStream(Protocol[A_co]):
    """A call that answers many times."""

    def __iter__(self) -> Iterator[A_co]:
        """Return the answers as they come."""

    def cancel(self) -> bool:
        """Tell the server that nobody listens any more."""


class Connection:
    """One channel to one address; several clients may share it."""

    def __init__(
        self,
        options: ChannelOptions,
        service: str = "service",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the options; `service` names the other side in messages."""
        self.options = options
        self._sleep = sleep
        self._peer = f"{service} at {options.address}"
        self._channel: grpc.Channel | None = None

    @classmethod
    def to(cls, target: "str | ChannelOptions", service: str) -> Self:
        """Return an open connection to an address, or as the options say."""
        options = ChannelOptions(address=target) if isinstance(target, str) else target
        return cls(options, service).open()

    def open(self) -> Self:
        """Make the channel; nothing is sent before the first call.

        Raises:
            InvalidRequestError: a TLS file cannot be read, or a token would travel in the clear.

        """
        arguments = channel_arguments(self.options)
        credentials = channel_credentials(self.options)
        address = self.options.address
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=arguments)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=arguments)
        return self

    def close(self) -> None:
        """End what is under way and free the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def channel(self) -> grpc.Channel:
        """The open channel."""
        return self._check_open()

    def call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Q, A]",
        request: Q,
        deadline_s: float | None = None,
    ) -> A:
        """Return the answer to one request, by default within the options' deadline.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        return self.ask(
            lambda left_s: method(request, timeout=left_s), deadline_s or self.options.deadline_s
        )

    def ask(
        self, attempt: Callable[[float], A], deadline_s: float, *, is_repeatable: bool = True
    ) -> A:
        """Return what an attempt returns, which is given the seconds left; again where refused.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        self._check_open()
        refusals = Refusals(self.options, deadline_s)
        while True:
            try:
                return attempt(refusals.left_s)
            except grpc.RpcError as err:
                error = rpc_to_error(err, self._peer)
            if not is_repeatable:
                raise error
            self._sleep(refusals.delay_after(error))

    def pages(
        self, method: "grpc.UnaryUnaryMultiCallable[PageQ, PageA]", request: PageQ
    ) -> Iterator[PageA]:
        """Yield all pages of a list from the request's on.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        while True:
            page = self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def stream(self, method: "grpc.UnaryStreamMultiCallable[Q, A]", request: Q) -> Iterator[A]:
        """Yield the answers to one request, which is made again where it is refused.

        The call starts with the first answer that is asked for; leaving early cancels it.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        refusals = Refusals(self.options, self.options.stream_deadline_s)
        has_begun = False
        while True:
            try:
                for answer in self.watch(method, request):
                    has_begun = True
                    yield answer
            except ServerBusyError as err:
                if has_begun:
                    raise
                self._sleep(refusals.delay_after(err))
            else:
                return

    def watch(self, method: "grpc.UnaryStreamMultiCallable[Q, A]", request: Q) -> Iterator[A]:
        """Yield the answers to one request, once.

        The call starts with the first answer that is asked for; leaving early cancels it.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        self._check_open()
        yield from self._iterate(method(request, timeout=self.options.stream_deadline_s))

    def exchange(
        self, method: "grpc.StreamStreamMultiCallable[Q, A]", requests: Iterator[Q]
    ) -> Generator[A]:
        """Yield the answers to a stream of requests.

        The call starts with the first answer that is asked for; leaving early cancels it.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        self._check_open()
        yield from self._iterate(method(requests, timeout=self.options.stream_deadline_s))

    def _check_open(self) -> grpc.Channel:
        if self._channel is None:
            raise InvalidRequestError(f"the connection to the {self._peer} is not open")
        return self._channel

    def _iterate(self, answers: ServerStream[A]) -> Iterator[A]:
        try:
            yield from answers
        except grpc.RpcError as err:
            raise rpc_to_error(err, self._peer) from None
        finally:
            answers.cancel()


def channel_arguments(options: ChannelOptions) -> list[tuple[str, Any]]:
    """Return gRPC's arguments for a channel: limits, retries, balancing, keepalive."""
    return [
        *client_options(options.keepalive_s),
        ("grpc.enable_retries", 1),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.service_config", json.dumps(_service_config())),
    ]


def channel_credentials(options: ChannelOptions) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel, None where it is in the clear.

    Raises:
        InvalidRequestError: a file cannot be read, or a token would travel in the clear.

    """
    if not (options.use_tls or options.ca_file or options.cert_file):
        if options.token_file:
            raise InvalidRequestError.of_field("token_file", "a token needs TLS; set use_tls")
        return None
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(options.ca_file, "ca_file"),
        private_key=_read(options.key_file, "key_file"),
        certificate_chain=_read(options.cert_file, "cert_file"),
    )
    token = _read(options.token_file, "token_file")
    if token is None:
        return credentials
    return grpc.composite_channel_credentials(
        credentials, grpc.access_token_call_credentials(_decode_token(token, options.token_file))
    )


def _decode_token(token: bytes, path: str) -> str:
    try:
        return token.decode("ascii").strip()
    except UnicodeDecodeError as err:
        raise InvalidRequestError.of_field("token_file", f"{path} holds no token: {err}") from err


def _service_config() -> Mapping[str, Any]:
    # Calls that create a job are not among them: an answer lost on the way would make two.
    names: Iterable[Mapping[str, str]] = [
        {"service": table.service, "method": line.rpc_name}
        for table in TABLES
        for line in table.lines().values()
        if line.is_idempotent
    ]
    return {
        "loadBalancingConfig": [{"round_robin": {}}],
        # Move calls away from a pod that says it is not serving.
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}],
    }


def _read(path: str, field: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise InvalidRequestError.of_field(field, f"cannot read {path}: {err.strerror}") from err
