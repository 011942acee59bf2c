"""Send one request and read its answer as it streams."""

import asyncio
import json
import ssl
from collections.abc import Callable
from http import HTTPStatus

import aiohttp

from foretoken.app.collect.answer import Answer
from foretoken.app.collect.event_stream import EventStream
from foretoken.app.collect.target import Target
from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.validation.answer_chunk import parse_chunk

# Of an error's body so much is kept.
_MAX_ERROR_CHARACTERS = 300
_CONNECT_TIMEOUT_S = 30.0

INTERRUPTED = "interrupted"

Clock = Callable[[], float]


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
