"""Host time of a token that a server streams: the source of two rules of `sglang-0.5`.

`output_us_per_seq` is that of a first token, `output_us_per_past_token` what each token before it
of the same answer adds.

Run: python tests/benchmarks/host_time_of_stream.py [STREAMS ...] [--past TOKENS ...]
    (needs fastapi, uvicorn, uvloop, httptools, pyzmq and pydantic)

A process with what SGLang 0.5.6's server does with a token, in its order: `managers/
tokenizer_manager.py` (`_handle_batch_output`, `_wait_one_response`) and `entrypoints/openai/
serving_chat.py` (`_generate_chat_stream`), under uvicorn. Another sends it steps of a token for
every stream, as the detokenizer does, the next when all of a step have arrived, and reads them.
Prints the processor time that the server takes for a token of answers that have `--past` tokens. It
waits as Python 3.12 does, which SGLang's image runs (docker/Dockerfile): without a task of its own.
"""

import argparse
import asyncio
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import uvicorn
import uvloop
import zmq
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, model_serializer

_TOKENS, _FIRST, _RUNS, _US_PER_S = 16_000, 4, 3, 1e6
_HOST, _WORD = "127.0.0.1", " word"


class _Delta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    hidden_states: object | None = None

    @model_serializer(mode="wrap")
    def _serialize(self, handler: Any) -> Any:
        data = handler(self)
        if self.hidden_states is None:
            data.pop("hidden_states", None)
        return data


class _Choice(BaseModel):
    index: int
    delta: _Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None = None
    matched_stop: int | str | None = None


class _Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[_Choice]
    usage: dict[str, Any] | None = None


class _Stream:
    """A request that waits for its tokens."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.outputs: list[dict[str, Any]] = []
        self.text = ""
        self.ids: list[int] = []


class _Server:
    """The streams of a server, and what comes for them from the detokenizer at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: dict[str, _Stream] = {}

    @asynccontextmanager
    async def receive(self, _: FastAPI) -> AsyncIterator[None]:
        """Hand out steps while the application runs."""
        task = asyncio.create_task(self._loop())
        yield
        task.cancel()

    async def answer(self, request: Request) -> StreamingResponse:
        """Open a stream."""
        name = (await request.json())["rid"]
        stream = self._streams[name] = _Stream()
        return StreamingResponse(self._write(stream), media_type="text/event-stream")

    async def lengthen(self, num: int) -> None:
        """Give each stream so many tokens, one after the other as they would have come."""
        for token in range(1000, 1000 + num):
            for stream in self._streams.values():
                # An object of its own, as each that comes from another process is.
                stream.ids.append(int(str(token)))
        for stream in self._streams.values():
            stream.text = _WORD * num

    async def tell_time(self) -> float:
        """Return the processor time so far."""
        return time.process_time()

    async def _loop(self) -> None:
        receiver = zmq.asyncio.Context(2).socket(zmq.PULL)
        receiver.bind(self._address)
        while True:
            step = await receiver.recv_pyobj()
            for place, name in enumerate(step["rids"]):
                stream = self._streams[name]
                meta = {
                    "id": name,
                    "finish_reason": step["finished_reasons"][place],
                    "prompt_tokens": step["prompt_tokens"][place],
                    "weight_version": "default",
                    "total_retractions": step["retraction_counts"][place],
                }
                meta.update(
                    {
                        "completion_tokens": step["completion_tokens"][place],
                        "cached_tokens": step["cached_tokens"][place],
                    }
                )
                stream.text += step["output_strs"][place]
                stream.ids.extend(step["output_ids"][place])
                stream.outputs.append(
                    {"text": stream.text, "output_ids": stream.ids.copy(), "meta_info": meta}
                )
                stream.event.set()

    async def _wait(self, stream: _Stream) -> AsyncIterator[dict[str, Any]]:
        while True:
            try:
                async with asyncio.timeout(4):
                    await stream.event.wait()
            except TimeoutError:
                continue
            output = stream.outputs[-1]
            stream.outputs = []
            stream.event.clear()
            yield output

    async def _write(self, stream: _Stream) -> AsyncIterator[str]:
        counts: dict[str, dict[int, Any]] = {"prompt_tokens": {}, "completion_tokens": {}}
        sent = {0: stream.text}
        async for output in self._wait(stream):
            index, meta = output.get("index", 0), output["meta_info"]
            for kind, by_index in counts.items():
                by_index[index] = meta[kind]
            before = sent.get(index, "")
            content = output["text"][len(before) :]
            sent[index] = before + content
            choice = _Choice(index=index, delta=_Delta(content=content))
            chunk = _Chunk(id=meta["id"], created=int(time.time()), choices=[choice], model="llama")
            yield f"data: {chunk.model_dump_json()}\n\n"


def serve(port: int, address: str) -> None:
    """Run the server."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    server = _Server(address)
    app = FastAPI(lifespan=server.receive)
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)
    app.add_api_route("/stream", server.answer, methods=["POST"])
    app.add_api_route("/past", server.lengthen, methods=["GET"])
    app.add_api_route("/time", server.tell_time, methods=["GET"])
    uvicorn.run(app, host=_HOST, port=port, log_level="error", loop="uvloop")


def main(num_streams: int, num_past: int) -> None:
    """Print the least time of a token in several runs."""
    least_us = min(_measure(num_streams, num_past) for _ in range(_RUNS))
    sys.stdout.write(f"{num_streams} streams, {num_past} tokens: {least_us:.1f} us a token\n")


def _measure(num_streams: int, num_past: int) -> float:
    with tempfile.TemporaryDirectory() as folder, _started(f"ipc://{folder}/steps") as port:
        sender = zmq.Context().socket(zmq.PUSH)
        sender.connect(f"ipc://{folder}/steps")
        names = [f"{place:032x}" for place in range(num_streams)]
        opened = _open(port, names)
        _get(port, f"past?num={num_past}")
        num_steps = _TOKENS // num_streams
        start_s = 0.0
        for step in range(_FIRST + num_steps):
            if step == _FIRST:
                start_s = _time_of(port)
            sender.send_pyobj(_step(names, step))
            _read(opened, num_streams)
        took_s = _time_of(port) - start_s
        sender.close()
    return _US_PER_S * took_s / (num_steps * num_streams)


@contextmanager
def _started(address: str) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "serve", str(port), address])
    try:
        for _ in range(200):
            try:
                _time_of(port)
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        # It would wait for its streams to end.
        server.kill()
        server.wait()


def _time_of(port: int) -> float:
    return float(_get(port, "time"))


def _get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://{_HOST}:{port}/{path}", timeout=30) as response:
        return json.load(response)


def _open(port: int, names: list[str]) -> selectors.BaseSelector:
    """Open streams; return what tells which of them has tokens."""
    opened = selectors.DefaultSelector()
    for name in names:
        connection = socket.create_connection((_HOST, port))
        body = json.dumps({"rid": name})
        head = f"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        # The answer's head is there when the stream is.
        connection.recv(1)
        opened.register(connection, selectors.EVENT_READ)
    return opened


def _step(names: list[str], step: int) -> dict[str, list[Any]]:
    num = len(names)
    return {
        "rids": names,
        "finished_reasons": [None] * num,
        "output_strs": [_WORD] * num,
        "output_ids": [[1000 + step]] * num,
        "prompt_tokens": [1000] * num,
        "completion_tokens": [step + 1] * num,
        "cached_tokens": [0] * num,
        "retraction_counts": [0] * num,
    }


def _read(opened: selectors.BaseSelector, num_tokens: int) -> None:
    """Read so many tokens."""
    while num_tokens > 0:
        for key, _ in opened.select(30):
            num_tokens -= key.fileobj.recv(1 << 16).count(b'"delta"')  # type: ignore[union-attr]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
        parser.add_argument("streams", nargs="*", type=int, default=[64, 128, 512])
        parser.add_argument("--past", nargs="*", type=int, default=[0])
        options = parser.parse_args()
        for streams in options.streams:
            for past in options.past:
                main(streams, past)
