"""Send one request and read its answer as it streams."""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp

from foretoken.app.collect.target import Target
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.serving_run import UNKNOWN, UNKNOWN_S, MeasuredRequest
from foretoken.simulator.validation.measured_run import AnswerChunk, parse_chunk

# Of an error's body so much is kept.
_MAX_ERROR_CHARACTERS = 300
_CONNECT_TIMEOUT_S = 30.0

INTERRUPTED = "interrupted"

Clock = Callable[[], float]


class EventStream:
    """Takes bytes as they come and gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the data of the events that this piece completes."""
        lines = (self._rest + piece).splitlines(keepends=True)
        self._rest = b""
        for index, line in enumerate(lines):
            is_last = index == len(lines) - 1
            # A carriage return at the end may be half of a line's ending.
            if is_last and not line.endswith(b"\n"):
                self._rest = line
                return
            yield from self._take(line.rstrip(b"\r\n").decode("utf-8", errors="replace"))

    def close(self) -> Iterator[str]:
        """Yield the event that the end of the stream completes, if any."""
        rest, self._rest = self._rest, b""
        yield from self._take(rest.rstrip(b"\r\n").decode("utf-8", errors="replace"))
        yield from self._take("")

    def _take(self, line: str) -> Iterator[str]:
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and self._data:
            data, self._data = "\n".join(self._data), []
            yield data


@dataclass(kw_only=True, slots=True)
class Answer:
    """Collects the events of an answer; times in s from the run's start."""

    planned_s: float
    sent_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    total_tokens: int = UNKNOWN
    prompt_tokens: int = UNKNOWN
    cached_tokens: int = UNKNOWN
    is_finished: bool = False
    error: str = ""

    def add(self, chunk: AnswerChunk, time_s: float) -> None:
        """Take in one event that came at a time."""
        self.error = self.error or chunk.error
        self.is_finished |= chunk.is_last or bool(chunk.finish_reason)
        self.prompt_tokens = max(self.prompt_tokens, chunk.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        num_new = self._count_new(chunk) if chunk.has_choice else 0
        self.total_tokens = max(self.total_tokens, chunk.total_tokens)
        if num_new > 0:
            self.chunk_s.append(time_s)
            self.chunk_tokens.append(num_new)

    def to_request(self) -> MeasuredRequest:
        """Return what was recorded; an answer that broke off has an error."""
        num_seen = sum(self.chunk_tokens)
        num_decode = self.total_tokens if self.total_tokens >= 0 else num_seen
        error = self.error
        if not error and not self.is_finished:
            error = f"the answer broke off after {num_seen} tokens"
        if not error and not self.chunk_s:
            error = "the answer had no tokens"
        # Events without counts may have held several tokens each: then nobody knows how many.
        is_counted = num_seen == num_decode
        return MeasuredRequest(
            planned_s=self.planned_s,
            arrival_s=self.sent_s,
            first_token_s=self.chunk_s[0] if self.chunk_s else UNKNOWN_S,
            last_token_s=self.chunk_s[-1] if self.chunk_s else UNKNOWN_S,
            num_prefill_tokens=self.prompt_tokens
            if self.prompt_tokens >= 0
            else self.num_prefill_tokens,
            num_decode_tokens=num_decode,
            chunk_s=tuple(self.chunk_s),
            chunk_tokens=tuple(self.chunk_tokens) if is_counted else (),
            error=error,
        )

    def _count_new(self, chunk: AnswerChunk) -> int:
        if chunk.total_tokens >= 0:
            return chunk.total_tokens - max(self.total_tokens, 0)
        if chunk.num_tokens >= 0:
            return chunk.num_tokens
        return int(chunk.has_tokens)


def open_client(target: Target) -> aiohttp.ClientSession:
    """Return a client with as many connections as requests; close it after use.

    Call it inside the event loop it is used in.

    Raises:
        InvalidRequestError: the file of certificates cannot be read.

    """
    # Compressed pieces would wait for each other.
    headers = {"Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=_verification(target)),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        trust_env=True,
    )


async def send_request(
    client: aiohttp.ClientSession, target: Target, body: bytes, answer: Answer, clock: Clock
) -> None:
    """Send a request and take its answer in; whatever goes wrong becomes the answer's error."""
    try:
        async with asyncio.timeout(target.timeout_s):
            await _stream(client, target, body, answer, clock)
    except TimeoutError:
        answer.error = f"no end within {target.timeout_s:g} s"
    except aiohttp.ClientError as err:
        answer.error = f"{type(err).__name__}: {err}".rstrip(": ")
    except ValueError as err:
        answer.error = f"an event that is no JSON: {err}"
    except asyncio.CancelledError:
        # The user stopped the run: what came so far is kept.
        answer.error = INTERRUPTED
        raise


async def _stream(
    client: aiohttp.ClientSession, target: Target, body: bytes, answer: Answer, clock: Clock
) -> None:
    headers = {"Content-Type": "application/json"}
    url = f"{target.root}{target.path}"
    answer.sent_s = clock()
    async with client.post(url, data=body, headers=headers, allow_redirects=False) as response:
        if response.status != HTTPStatus.OK:
            answer.error = _describe(response.status, await response.read())
            return
        events = EventStream()
        async for piece in response.content.iter_any():
            time_s = clock()
            for data in events.feed(piece):
                answer.add(parse_chunk(data), time_s)
        for data in events.close():
            answer.add(parse_chunk(data), clock())


def _describe(status: int, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        message = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = text
    return f"HTTP {status}: {message[:_MAX_ERROR_CHARACTERS].strip()}"


def _verification(target: Target) -> ssl.SSLContext | bool:
    if not target.verifies_tls:
        return False
    if not target.certificates:
        return True
    try:
        return ssl.create_default_context(cafile=target.certificates)
    except (OSError, ssl.SSLError) as err:
        problem = f"cannot read certificates from {target.certificates}: {err}"
        raise InvalidRequestError.of_field("--certificates", problem) from err
