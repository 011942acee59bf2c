"""A connection to a service for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Self, TypeVar

import grpc

from foretoken.client.channel import PageA, PageQ, channel_arguments, channel_credentials
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.refusals import Refusals
from foretoken.domain.errors import InvalidRequestError, ServerBusyError
from foretoken.wire.errors import rpc_to_error

A = TypeVar("A")
Q = TypeVar("Q")


class AsyncConnection:
    """One channel to one address, for the event loop it was opened in."""

    def __init__(
        self,
        options: ChannelOptions,
        service: str = "service",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Keep the options; `service` names the other side in messages."""
        self.options = options
        self._sleep = sleep
        self._peer = f"{service} at {options.address}"
        self._channel: grpc.aio.Channel | None = None

    @classmethod
    def to(cls, target: str | ChannelOptions, service: str) -> Self:
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
            self._channel = grpc.aio.insecure_channel(address, options=arguments)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=arguments)
        return self

    async def close(self) -> None:
        """End what is under way and free the channel."""
        if self._channel is not None:
            await self._channel.close(grace=None)
            self._channel = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The open channel."""
        return self._check_open()

    async def call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Q, A]",
        request: Q,
        deadline_s: float | None = None,
    ) -> A:
        """Return the answer to one request, by default within the options' deadline.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        return await self.ask(
            lambda left_s: method(request, timeout=left_s), deadline_s or self.options.deadline_s
        )

    async def ask(
        self,
        attempt: Callable[[float], Awaitable[A]],
        deadline_s: float,
        *,
        is_repeatable: bool = True,
    ) -> A:
        """Return what an attempt returns, which is given the seconds left; again where refused.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        self._check_open()
        refusals = Refusals(self.options, deadline_s)
        while True:
            try:
                return await attempt(refusals.left_s)
            except grpc.aio.AioRpcError as err:
                error = rpc_to_error(err, self._peer)
            if not is_repeatable:
                raise error
            await self._sleep(refusals.delay_after(error))

    async def pages(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[PageQ, PageA]", request: PageQ
    ) -> AsyncIterator[PageA]:
        """Yield all pages of a list from the request's on.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        while True:
            page = await self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def stream(
        self, method: "grpc.aio.UnaryStreamMultiCallable[Q, A]", request: Q
    ) -> AsyncIterator[A]:
        """Yield the answers to one request, which is made again where it is refused.

        Leaving early cancels the call.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        refusals = Refusals(self.options, self.options.stream_deadline_s)
        has_begun = False
        while True:
            try:
                async for answer in self.watch(method, request):
                    has_begun = True
                    yield answer
            except ServerBusyError as err:
                if has_begun:
                    raise
                await self._sleep(refusals.delay_after(err))
            else:
                return

    async def watch(
        self, method: "grpc.aio.UnaryStreamMultiCallable[Q, A]", request: Q
    ) -> AsyncIterator[A]:
        """Yield the answers to one request, once; leaving early cancels the call.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        self._check_open()
        answers = method(request, timeout=self.options.stream_deadline_s)
        try:
            async for answer in answers:
                yield answer
        except grpc.aio.AioRpcError as err:
            raise rpc_to_error(err, self._peer) from None
        finally:
            answers.cancel()

    async def exchange(
        self,
        method: "grpc.aio.StreamStreamMultiCallable[Q, A]",
        requests: AsyncIterator[Q],
    ) -> AsyncGenerator[A]:
        """Yield the answers to a stream of requests; leaving early cancels the call.

        Raises:
            ForetokenError: the service's error, or `ServiceUnavailableError`.

        """
        self._check_open()
        answers = method(requests, timeout=self.options.stream_deadline_s)
        try:
            async for answer in answers:
                yield answer
        except grpc.aio.AioRpcError as err:
            raise rpc_to_error(err, self._peer) from None
        finally:
            answers.cancel()

    def _check_open(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise InvalidRequestError(f"the connection to the {self._peer} is not open")
        return self._channel
