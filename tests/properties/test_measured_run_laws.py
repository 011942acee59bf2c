"""Laws of measured runs: however they come, they mean the same, and nothing else is let through."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.app.collect.replay import PromptMaker
from foretoken.app.collect.sender import EventStream
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.serving_run import (
    MeasuredRequest,
    ServingRun,
    decode_run,
    encode_run,
)
from foretoken.simulator.validation.measured_run import load_run
from foretoken.simulator.workload.request_plan import plan_requests

_TEXTS = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1, max_size=30)
_ENDINGS = st.sampled_from(["\n", "\r\n"])


@given(texts=st.lists(_TEXTS, max_size=6), ending=_ENDINGS, data=st.data())
def test_events_are_the_same_wherever_their_bytes_are_split(
    texts: list[str], ending: str, data: st.DataObject
) -> None:
    stream = "".join(f": note{ending}data: {text}{ending}{ending}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [
        stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    events = EventStream()
    found = [event for piece in pieces for event in events.feed(piece)]
    assert texts == [*found, *events.close()]


@st.composite
def _requests(draw: st.DrawFn) -> MeasuredRequest:
    times = sorted(draw(st.lists(st.integers(0, 10**9), min_size=3, max_size=8)))
    arrival, *chunks = (time / 1e6 for time in times)
    return MeasuredRequest(
        arrival_s=arrival,
        first_token_s=chunks[0],
        last_token_s=chunks[-1],
        num_prefill_tokens=draw(st.integers(0, 10**6)),
        num_decode_tokens=draw(st.integers(0, 10**6)),
        chunk_s=tuple(chunks),
        block_hashes=tuple(draw(st.lists(st.integers(0, 2**62), max_size=3))),
        error=draw(st.text(max_size=9)),
    )


@given(requests=st.lists(_requests(), max_size=5), concurrency=st.integers(0, 99))
def test_a_run_survives_its_file(requests: list[MeasuredRequest], concurrency: int) -> None:
    run = ServingRun(name="a run", requests=tuple(requests), concurrency=concurrency)
    assert run == decode_run(json.loads(encode_run(run)))


_JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("benchmarks", "successful", "info", "timings", "request_start", "config"),
                    *("format", "version", "requests", "experiments", "timestamp"),
                    *("response_timestamps", "response_outputs", "metadata", "metrics", "error"),
                    *("request_start_ns", "time_to_first_token", "value", "unit", "arrival_s"),
                    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"),
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)
_FORMATS = st.sampled_from(
    ["aiperf", "foretoken_run", "genai_perf", "guidellm", "table", "vllm_bench"]
)


@given(content=_JSON | st.text(max_size=60), name=_FORMATS)
def test_whatever_a_file_holds_it_is_a_run_or_an_error_that_says_why(
    content: Any, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "measured"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8", errors="replace")
    with suppress(InvalidRequestError):
        assert load_run(path, name).completed


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_prompts_have_their_length_and_are_made_again(lengths: list[int], seed: int) -> None:
    prompts = np.array(lengths, dtype=np.int64)
    plan = plan_requests(prompts * 0, prompts, prompts)
    maker = PromptMaker(plan, seed)
    for index, length in enumerate(lengths):
        tokens = maker.make_token_ids(index)
        assert length == len(tokens) == len(maker.make_words(index).split())
        assert tokens == PromptMaker(plan, seed).make_token_ids(index)
        assert all(0 < token < 32_000 for token in tokens)
