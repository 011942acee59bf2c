"""A connection to a service: its options, what both clients do over it, errors as the domain's."""

import asyncio
import json
import logging
import queue
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import grpc

from foretoken.client.blocking import iterate
from foretoken.client.calls import Feed, Method
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.retries import MAX_ATTEMPTS
from foretoken.domain.call_scope import current_scope, within_call
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire import trace
from foretoken.wire.credential_files import CredentialFiles
from foretoken.wire.errors import rpc_to_error
from foretoken.wire.keepalive import client_options
from foretoken.wire.rpc import Unary
from foretoken.wire.rpcs import TABLES

_log = logging.getLogger(__name__)

# How often a call for the sake of another looks whether that is still wanted.
_LOOK_EVERY_S = 0.2
_CA, _CERTIFICATE, _KEY = "ca_file", "cert_file", "key_file"
_TOKEN = "token_file"  # noqa: S105 - the name of an option
_RETRY_POLICY = {
    "maxAttempts": MAX_ATTEMPTS,
    "initialBackoff": "0.2s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}

C = TypeVar("C", grpc.Channel, grpc.aio.Channel)


class _Connection(Generic[C]):
    """One channel to one address; several clients may share it."""

    # In the clear, and with credentials.
    _make_channel: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]

    def __init__(self, options: ChannelOptions, service: str = "service") -> None:
        """Keep the options; `service` names the other side in messages."""
        self.options = options
        self.peer = f"{service} at {options.address}"
        self._channel: C | None = None
        # Their calls go on; without any, gRPC ends their connections by itself.
        self._earlier: list[C] = []
        self._files = credential_files(options)

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
        self._channel = self._make()
        return self

    @property
    def channel(self) -> C:
        """The open channel, which is another one when certificates have been renewed.

        Raises:
            InvalidRequestError: it is closed.

        """
        if self._channel is None:
            raise InvalidRequestError(f"the connection to the {self.peer} is not open")
        if self._files.has_changed():
            try:
                renewed = self._make()
            except InvalidRequestError as err:
                _log.warning("certificates stay as they were: %s", err.message)
            else:
                self._earlier.append(self._channel)
                self._channel = renewed
        return self._channel

    def _make(self) -> C:
        arguments = channel_arguments(self.options)
        credentials = channel_credentials(self.options, self._files)
        make_insecure, make_secure = self._make_channel
        if credentials is None:
            return cast("C", make_insecure(self.options.address, options=arguments))
        return cast("C", make_secure(self.options.address, credentials, options=arguments))

    def _take_channels(self) -> list[C]:
        """Return all channels there were, and keep none."""
        channels = self._earlier
        if self._channel is not None:
            channels.append(self._channel)
        self._earlier, self._channel = [], None
        return channels


class Connection(_Connection[grpc.Channel]):
    """One channel to one address; several clients may share it."""

    loses_status: ClassVar = False
    _make_channel = (grpc.insecure_channel, grpc.secure_channel)

    def close(self) -> None:
        """End what is under way and free the channel."""
        for channel in self._take_channels():
            channel.close()

    def exchange(self, method: Method, requests: Any) -> Generator[Any]:
        """Yield the answers to a stream of requests, or to one.

        The call starts with the first answer that is asked for; leaving early cancels it.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        return iterate(self.answers(method, requests))

    async def send(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Return the answer to one request, or to a stream of them.

        A call for the sake of another ends when that one does, also where its caller leaves.
        """
        scope = current_scope()
        with _traced(method) as metadata:
            if scope is None:
                return method.call(request, timeout=timeout_s, metadata=metadata)
            call = method.call.future(request, timeout=timeout_s, metadata=metadata)
            try:
                while True:
                    with suppress(grpc.FutureTimeoutError):
                        return call.result(timeout=_LOOK_EVERY_S)
                    scope.check()
            finally:
                call.cancel()

    async def answers(
        self, method: Method, request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any]:
        """Yield the answers to one request, or to a stream of them."""
        _ = self.channel
        timeout_s = within_call(timeout_s or self.options.stream_deadline_s)
        try:
            with _traced(method) as metadata:
                answers = method.call(request, timeout=timeout_s, metadata=metadata)
                try:
                    for answer in answers:
                        yield answer
                finally:
                    answers.cancel()
        except grpc.RpcError as err:
            raise rpc_to_error(err, self.peer) from None

    async def wait(self, delay_s: float) -> None:
        """Wait so many seconds."""
        time.sleep(delay_s)  # noqa: ASYNC251 - who calls this has no event loop to hold up

    def feed(self) -> Feed:
        """Return requests that gRPC takes in a thread of its own, which None ends."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        return Feed(requests.put, iter(requests.get, None))

    def requests(self, messages: AsyncGenerator[Any]) -> Any:
        """Return messages as gRPC takes them."""
        return iterate(messages)


class AsyncConnection(_Connection[grpc.aio.Channel]):
    """One channel to one address, for the event loop it was opened in."""

    loses_status: ClassVar = True
    _make_channel = (grpc.aio.insecure_channel, grpc.aio.secure_channel)

    async def close(self) -> None:
        """End what is under way and free the channel."""
        for channel in self._take_channels():
            await channel.close(grace=None)

    async def send(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Return the answer to one request, or to a stream of them."""
        with _traced(method) as metadata:
            return await method.call(request, timeout=timeout_s, metadata=metadata)

    async def answers(
        self, method: Method, request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any]:
        """Yield the answers to one request, or to a stream of them."""
        _ = self.channel
        timeout_s = timeout_s or self.options.stream_deadline_s
        try:
            with _traced(method) as metadata:
                answers = method.call(request, timeout=timeout_s, metadata=metadata)
                try:
                    async for answer in answers:
                        yield answer
                finally:
                    answers.cancel()
        except grpc.aio.AioRpcError as err:
            raise rpc_to_error(err, self.peer) from None

    async def wait(self, delay_s: float) -> None:
        """Wait so many seconds."""
        await asyncio.sleep(delay_s)

    def feed(self) -> Feed:
        """Return requests that gRPC takes in a task of its own, which None ends."""
        requests: asyncio.Queue[Any] = asyncio.Queue()
        return Feed(requests.put_nowait, _drain(requests))

    def requests(self, messages: AsyncGenerator[Any]) -> Any:
        """Return messages as gRPC takes them."""
        return messages


@contextmanager
def _traced(method: Method) -> Iterator[Sequence[tuple[str, str]] | None]:
    """Make a call as a span, and yield the metadata that says for which request."""
    name, attributes = trace.describe_call(method.path)
    found = trace.begin(name, trace.Kind.CLIENT, attributes=attributes)
    # Of whoever leaves before the end.
    code = grpc.StatusCode.CANCELLED
    try:
        yield trace.headers_of(found)
        code = grpc.StatusCode.OK
    except grpc.RpcError as err:
        code = cast("grpc.Call", err).code()
        raise
    finally:
        found.set(trace.STATUS_CODE, code.name)
        found.end("" if code is grpc.StatusCode.OK else code.name)


async def _drain(requests: "asyncio.Queue[Any]") -> AsyncIterator[Any]:
    while (request := await requests.get()) is not None:
        yield request


def channel_arguments(options: ChannelOptions) -> list[tuple[str, Any]]:
    """Return gRPC's arguments for a channel: limits, retries, balancing, keepalive."""
    return [
        *client_options(options.keepalive_s),
        ("grpc.enable_retries", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.service_config", json.dumps(_service_config())),
    ]


def credential_files(options: ChannelOptions) -> CredentialFiles:
    """Return the files that say who both sides are, but for the token."""
    names = (_CA, _CERTIFICATE, _KEY)
    return CredentialFiles({name: getattr(options, name) for name in names})


def channel_credentials(
    options: ChannelOptions, files: CredentialFiles
) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel, None where it is in the clear.

    Raises:
        InvalidRequestError: a file cannot be read, or a token would travel in the clear.

    """
    if not (options.use_tls or options.ca_file or options.cert_file):
        if options.token_file:
            raise InvalidRequestError.of_field("token_file", "a token needs TLS; set use_tls")
        return None
    found = files.read()
    credentials = grpc.ssl_channel_credentials(
        root_certificates=found.get(_CA),
        private_key=found.get(_KEY),
        certificate_chain=found.get(_CERTIFICATE),
    )
    if not options.token_file:
        return credentials
    token = grpc.metadata_call_credentials(_Token(options.token_file))
    return grpc.composite_channel_credentials(credentials, token)


class _Token(grpc.AuthMetadataPlugin):
    """Shows what is in a file, read again when it changes: tokens of pods live for an hour."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = CredentialFiles({_TOKEN: path})
        self._token = self._read()

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        """Add the token to a call."""
        del context
        if self._files.has_changed():
            with suppress(InvalidRequestError):
                self._token = self._read()
        callback((("authorization", f"Bearer {self._token}"),), None)

    def _read(self) -> str:
        token = self._files.read()[_TOKEN]
        try:
            return token.decode("ascii").strip()
        except UnicodeDecodeError as err:
            raise InvalidRequestError.of_field(
                _TOKEN, f"{self._path} holds no token: {err}"
            ) from err


def _service_config() -> Mapping[str, Any]:
    # Calls that create a job are not among them: an answer lost on the way would make two. Nor are
    # streams, which gRPC's retries may leave waiting: see `Refusals.delay_after_loss`.
    names: Iterable[Mapping[str, str]] = [
        {"service": table.service, "method": line.rpc_name}
        for table in TABLES
        for line in table.lines().values()
        if line.is_idempotent and isinstance(line, Unary)
    ]
    return {
        "loadBalancingConfig": [{"round_robin": {}}],
        # Move calls away from a pod that says it is not serving.
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}],
    }
