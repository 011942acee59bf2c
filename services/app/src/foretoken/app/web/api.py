"""`/v1`: every rpc of the table as JSON, with the names of the protos.

`POST /v1/SERVICE/RPC` takes the request's message. What only reads, and takes no more than names
and numbers, answers `GET` with a query string too. Rows are JSON, CSV or Arrow by `Accept`; what
comes bit by bit is a line of JSON each, or server-sent events.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from aiohttp import web
from google.protobuf.message import Message

from foretoken.app.web.callers import Callers, peer_of
from foretoken.app.web.calls import Caller, Calls, rpcs_of
from foretoken.app.web.problem import HttpRefusal, answer_problem, describe_problem
from foretoken.app.web.rows import ARROW, FORMATS
from foretoken.app.web.uploads import UPLOADS
from foretoken.domain.errors import StreamIdleError
from foretoken.wire.message_json import fields_to_message, message_to_json, read_message
from foretoken.wire.rights import Right
from foretoken.wire.rpc import RpcMessages, Stream, Table

PREFIX: Final = "/v1"
_EVENTS, _LINES, _BYTES = "text/event-stream", "application/x-ndjson", "application/octet-stream"
_JSON: Final = "application/json"
# Proxies end connections over which nothing comes for a minute.
_BEAT_S = 15.0
# Smaller answers are not worth compressing.
_LEAST_COMPRESSED_BYTES = 1_024
_WRONG_TYPE = 415
# Of an event's id: longer ones were not sent here.
_MOST_DIGITS = 9


def add_api(routes: web.UrlDispatcher, calls: Calls, callers: Callers) -> None:
    """Add the routes of all services that are offered."""
    for service in calls.offered.names:
        for name, messages in rpcs_of(service).items():
            call = _Call(messages, calls, callers)
            path = f"{PREFIX}/{service}/{name}"
            routes.add_post(path, call.post)
            if has_get(messages):
                routes.add_get(path, call.get, allow_head=False)


def has_get(messages: RpcMessages) -> bool:
    """Return whether an rpc only reads, so that a query string may ask for it."""
    return messages.line.right is Right.READ and messages.line.name not in UPLOADS


def is_bytes(messages: RpcMessages) -> bool:
    """Return whether the replies are the pieces of a file."""
    fields = messages.reply_class.DESCRIPTOR.fields
    return isinstance(messages.line, Stream) and [field.name for field in fields] == ["content"]


class _Call:
    """One rpc over HTTP."""

    def __init__(self, messages: RpcMessages, calls: Calls, callers: Callers) -> None:
        self._messages = messages
        self._calls = calls
        self._callers = callers

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Answer a body."""
        messages = self._messages
        # Nothing is read of who may not call.
        caller = await self._find(request)
        if messages.line.name in UPLOADS:
            body = _Body(request.content, asyncio.get_running_loop(), self._calls.idle_s)
            sent = UPLOADS[messages.line.name](request.query, body)
            return await self._answer(request, caller, lambda: sent)
        if request.content_type != _JSON and request.can_read_body:
            raise HttpRefusal(
                _WRONG_TYPE, "CONTENT_TYPE", f"send {_JSON}, not {request.content_type}"
            )
        text = await request.read()
        return await self._answer(
            request, caller, lambda: read_message(text, messages.request_class)
        )

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer a query string."""
        given = {key: request.query.getall(key) for key in request.query}
        return await self._answer(
            request,
            await self._find(request),
            lambda: fields_to_message(given, self._messages.request_class),
        )

    async def _find(self, request: web.Request) -> Caller:
        return Caller(await self._callers.find(request), peer_of(request))

    async def _answer(
        self, request: web.Request, caller: Caller, read: Callable[[], Any]
    ) -> web.StreamResponse:
        descriptor = self._messages.request_class.DESCRIPTOR
        try:
            sent = read()
            if isinstance(self._messages.line, Table):
                return await self._send_rows(request, caller, sent)
            if self._messages.kind.endswith("_stream"):
                return await self._send_items(request, caller, sent)
            reply = await self._calls.answer(self._messages, caller, sent)
        except Exception as err:  # noqa: BLE001
            # The boundary of the process: every error must become an answer.
            return answer_problem(err, descriptor)
        text = json.dumps(message_to_json(reply), ensure_ascii=False, separators=(",", ":"))
        return compressed(web.Response(text=f"{text}\n", content_type=_JSON))

    async def _send_rows(
        self, request: web.Request, caller: Caller, sent: Message
    ) -> web.StreamResponse:
        accepted = [part.partition(";")[0].strip() for part in request.headers.getall("Accept", [])]
        accepted = [one for part in accepted for one in part.split(",")]
        media = next((one for one in accepted if one in FORMATS), _JSON)
        sending = self._sending(request, media)
        if media != ARROW:
            sending.answer.enable_compression()

        def shape(chunks: Iterator[Any]) -> Iterator[bytes]:
            return FORMATS[media](chunk.arrow_ipc for chunk in chunks)

        return await self._stream(sending, caller, sent, shape)

    async def _send_items(
        self, request: web.Request, caller: Caller, sent: Any
    ) -> web.StreamResponse:
        if is_bytes(self._messages):
            return await self._stream(
                self._sending(request, _BYTES),
                caller,
                sent,
                lambda pieces: (p.content for p in pieces),
            )
        if _EVENTS not in request.headers.get("Accept", ""):
            return await self._stream(
                self._sending(request, _LINES), caller, sent, lambda items: map(_line, items)
            )
        first = 0
        if "first" in self._messages.request_class.DESCRIPTOR.fields_by_name:
            # A browser that was cut off says what it has.
            last = request.headers.get("Last-Event-ID", "")
            if last.isdecimal() and len(last) <= _MOST_DIGITS:
                sent.first = int(last) + 1
            first = sent.first
        sending = self._sending(request, _EVENTS)
        async with sending.beating():
            return await self._stream(
                sending, caller, sent, lambda items: _write_events(items, first)
            )

    def _sending(self, request: web.Request, media: str) -> "_Sending":
        return _Sending(request, media, self._calls.idle_s)

    async def _stream(
        self,
        sending: "_Sending",
        caller: Caller,
        sent: Any,
        shape: Callable[[Iterator[Any]], Iterator[bytes]],
    ) -> web.StreamResponse:
        try:
            await self._calls.stream(self._messages, caller, sent, shape, sending.send)
        except ConnectionError:
            return sending.answer
        except Exception as err:
            document = describe_problem(err, self._messages.request_class.DESCRIPTOR)
            if not sending.answer.prepared:
                raise
            if sending.media == _EVENTS:
                await sending.send(_event("problem", document))
            elif sending.media == _LINES:
                await sending.send(f"{json.dumps({'problem': document})}\n".encode())
            else:
                # Half of a table is no table: the connection breaks instead of ending well.
                sending.abort()
                return sending.answer
        await sending.finish()
        return sending.answer


class _Sending:
    """An answer that is sent as it is made; its head goes with the first piece."""

    def __init__(self, request: web.Request, media: str, idle_s: float) -> None:
        self._request = request
        self._idle_s = idle_s
        self.media = media
        self.answer = web.StreamResponse(headers={"Content-Type": media})
        if media == _EVENTS:
            self.answer.headers["X-Accel-Buffering"] = "no"

    async def send(self, piece: bytes) -> None:
        """Send a piece, when the one before was taken."""
        if not self.answer.prepared:
            await self.answer.prepare(self._request)
        try:
            async with asyncio.timeout(self._idle_s):
                await self.answer.write(piece)
        except TimeoutError:
            # A client that reads no more holds a thread, and reads no error either.
            self.abort()
            raise ConnectionAbortedError from None

    async def finish(self) -> None:
        """End it well; a client that has left with the last piece has all of it."""
        if not self.answer.prepared:
            await self.answer.prepare(self._request)
        with suppress(ConnectionError):
            await self.answer.write_eof()

    def abort(self) -> None:
        """Break the connection."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def beating(self) -> "_Beat":
        """Say now and then that the connection is there."""
        return _Beat(self)


class _Beat:
    def __init__(self, sending: _Sending) -> None:
        self._sending = sending

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await self._task

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            await self._sending.send(b": still there\n\n")


class _Body:
    """The body of a request as blocking pieces, for a thread."""

    def __init__(self, content: Any, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        self._content = content
        self._loop = loop
        self._idle_s = idle_s

    def __iter__(self) -> Iterator[bytes]:
        while piece := asyncio.run_coroutine_threadsafe(self._read(), self._loop).result():
            yield piece

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s):
                piece: bytes = await self._content.readany()
        except TimeoutError:
            raise StreamIdleError(f"nothing came for {self._idle_s:g} s; send it again") from None
        return piece


def compressed(answer: web.Response) -> web.Response:
    """Return an answer that is compressed where the caller can take that and it is worth it."""
    body = answer.body
    if isinstance(body, bytes) and len(body) >= _LEAST_COMPRESSED_BYTES:
        answer.enable_compression()
    return answer


def _line(message: Message) -> bytes:
    return f"{json.dumps(message_to_json(message), ensure_ascii=False)}\n".encode()


def _write_events(items: Iterable[Message], first: int) -> Iterator[bytes]:
    for number, item in enumerate(items, first):
        yield _event("item", message_to_json(item), number)
    yield _event("end", {})


def _event(kind: str, content: Any, number: int | None = None) -> bytes:
    start = f"id: {number}\n" if number is not None else ""
    return f"{start}event: {kind}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
