"""A small real HTTP server that streams answers as an OpenAI-compatible one does.

It runs on a free port in a thread of its own. What it does with a request is decided by its place
in the order of arrival: tokens with known delays, several in an event, events split anywhere,
errors, connections that break off.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the server does with one request.

    `tokens_per_event` tokens come `delay_s` after each other, the first once `waits_for` requests
    have come; the bytes of an event are sent in pieces of `piece_bytes` (0: at once). After
    `break_after` tokens (0: never) it hangs up; with `status` it refuses.
    """

    delay_s: float = 0.0
    tokens_per_event: int = 1
    piece_bytes: int = 0
    break_after: int = 0
    status: int = 200
    says_usage: bool = True
    counts_each: bool = True
    num_tokens: int = 0
    bad_event: bool = False
    hangs_s: float = 0.0
    waits_for: int = 0


@dataclass(kw_only=True)
class StreamingServer:
    """Context manager; `bodies` are the requests it got, `url` its address."""

    behaviours: Sequence[Behaviour] = (Behaviour(),)
    models: Sequence[str] = ("tiny",)
    metrics: Sequence[str] = ()
    api_key: str = ""
    tls: ssl.SSLContext | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_under_way: int = 0
    num_under_way_max: int = 0
    num_metrics: int = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._came = asyncio.Condition()
        self._handlers: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self.tls)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._handle(reader, writer))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().splitlines()
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if not await self._answer(lines[0].split()[1], headers, body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, path: str, headers: Mapping[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        self.paths.append(path)
        if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            return await _send_plain(writer, 401, {"error": {"message": "bad key"}})
        if path == "/v1/models":
            listed = {"data": [{"id": name} for name in self.models]}
            return await _send_plain(writer, 200 if self.models else 404, listed)
        if path == "/metrics":
            return await self._send_metrics(writer)
        request = json.loads(body)
        behaviour = self.behaviours[min(len(self.bodies), len(self.behaviours) - 1)]
        self.bodies.append(request)
        if behaviour.status != 200:
            problem = {"error": {"message": "no room", "type": "overloaded"}}
            return await _send_plain(writer, behaviour.status, problem)
        self.num_under_way += 1
        self.num_under_way_max = max(self.num_under_way_max, self.num_under_way)
        try:
            async with self._came:
                self._came.notify_all()
                await self._came.wait_for(lambda: len(self.bodies) >= behaviour.waits_for)
            return await _stream(request, behaviour, path, writer)
        finally:
            self.num_under_way -= 1

    async def _send_metrics(self, writer: asyncio.StreamWriter) -> bool:
        if not self.metrics:
            return await _send_plain(writer, 404, {})
        text = self.metrics[min(self.num_metrics, len(self.metrics) - 1)]
        self.num_metrics += 1
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        return True


async def _send_plain(writer: asyncio.StreamWriter, status: int, content: Any) -> bool:
    text = json.dumps(content)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    await writer.drain()
    return True


async def _stream(
    request: Mapping[str, Any], behaviour: Behaviour, path: str, writer: asyncio.StreamWriter
) -> bool:
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    writer.write(head.encode())
    await asyncio.sleep(behaviour.hangs_s)
    total = behaviour.num_tokens or int(request["max_tokens"])
    is_chat = path.endswith("chat/completions")
    if is_chat:
        await _send_event(writer, _event(is_chat, "", None), behaviour)
    for sent in range(behaviour.tokens_per_event, total + 1, behaviour.tokens_per_event):
        await asyncio.sleep(behaviour.delay_s)
        usage = _usage(request, sent) if behaviour.counts_each else None
        text = (
            "{" if behaviour.bad_event else _event(is_chat, " word", usage, is_last=sent == total)
        )
        await _send_event(writer, text, behaviour)
        if behaviour.break_after and sent >= behaviour.break_after:
            writer.transport.abort()
            return False
    if behaviour.says_usage:
        final = {"choices": [], "usage": _usage(request, total)}
        await _send_event(writer, json.dumps(final), behaviour)
    await _send_event(writer, "[DONE]", behaviour)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _event(is_chat: bool, text: str, usage: Any, *, is_last: bool = False) -> str:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
    choice |= {"delta": {"content": text}} if is_chat else {"text": text}
    return json.dumps({"choices": [choice], **({"usage": usage} if usage else {})})


def _usage(request: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    prompt = request.get("prompt") or request["messages"][0]["content"]
    size = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    return {"prompt_tokens": size, "completion_tokens": num_tokens}


async def _send_event(writer: asyncio.StreamWriter, text: str, behaviour: Behaviour) -> None:
    data = f": a comment\r\ndata: {text}\r\n\r\n".encode()
    size = behaviour.piece_bytes or len(data)
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
        if behaviour.piece_bytes:
            await asyncio.sleep(0)
