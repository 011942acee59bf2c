"""A run collected from a server says what the server did, whatever it did."""

import asyncio
import json
import os
import signal
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import sign_itself
from streaming_server import Behaviour, StreamingServer

from foretoken.app.collect.recording import Collection, collect_run
from foretoken.app.collect.target import Target
from foretoken.domain.errors import (
    InvalidRequestError,
    ServiceUnavailableError,
    UnauthenticatedError,
    UnknownModelError,
)
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import (
    MeasuredRequest,
    ServingRun,
    decode_run,
    encode_run,
)
from foretoken.domain.requests.workload import LengthSpec, Request, SessionSpec, WorkloadSpec
from foretoken.simulator.validation.measured_run import scenario_of_run
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests
from foretoken.simulator.workload.requests import resolve_workload

_METRICS = """vllm:cache_config_info{{block_size="16",num_gpu_blocks="500"}} 1.0
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
"""


def _plan(num_requests: int, gap_s: float = 0.0, *, concurrency: int = 0) -> RequestPlan:
    arrival = (np.arange(num_requests) * gap_s * 1e9).astype(np.int64)
    ones = np.ones(num_requests, dtype=np.int64)
    return plan_requests(arrival, ones * 20, ones * 6, concurrency=concurrency)


def _collect(asked: StreamingServer, plan: RequestPlan, **changes: Any) -> ServingRun:
    target = Target(**{"url": asked.url, "model": "tiny", **changes})
    return collect_run(Collection(target=target, plan=plan, num_warm_up=0))


def _only(run: ServingRun) -> MeasuredRequest:
    (request,) = run.requests
    return request


def test_each_token_is_recorded_when_it_came() -> None:
    """Delays of a known length are found again, never shorter than they were."""
    with StreamingServer(behaviours=[Behaviour(delay_s=0.03)]) as server:
        request = _only(_collect(server, _plan(1)))
    assert (20, 6, (1,) * 6, "") == (
        request.num_prefill_tokens,
        request.num_decode_tokens,
        request.chunk_tokens,
        request.error,
    )
    # The clock of the server's sleep may end a little early.
    earliest = request.arrival_s + 0.029 * np.arange(1, 7)
    assert (np.array(request.chunk_s) >= earliest).all()
    assert (request.first_token_s, request.last_token_s) == (
        request.chunk_s[0],
        request.chunk_s[-1],
    )


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1000])
def test_events_may_be_split_anywhere(piece_bytes: int) -> None:
    with StreamingServer(behaviours=[Behaviour(piece_bytes=piece_bytes)]) as server:
        request = _only(_collect(server, _plan(1)))
    assert ("", 6, 6) == (request.error, request.num_decode_tokens, len(request.chunk_s))


def test_tokens_that_come_together_are_counted_where_the_server_counts() -> None:
    with StreamingServer(behaviours=[Behaviour(tokens_per_event=3)]) as server:
        counted = _only(_collect(server, _plan(1)))
    assert ((3, 3), 6) == (counted.chunk_tokens, counted.num_decode_tokens)


def test_tokens_that_come_together_are_not_guessed() -> None:
    """With a count at the end alone, nobody knows how many came when."""
    behaviour = Behaviour(tokens_per_event=3, counts_each=False)
    with StreamingServer(behaviours=[behaviour]) as server:
        request = _only(_collect(server, _plan(1)))
    assert ((), 2, 6) == (request.chunk_tokens, len(request.chunk_s), request.num_decode_tokens)


def test_without_any_count_the_events_are_the_tokens() -> None:
    behaviour = Behaviour(counts_each=False, says_usage=False)
    with StreamingServer(behaviours=[behaviour]) as server:
        request = _only(_collect(server, _plan(1)))
    assert (20, 6, (1,) * 6) == (
        request.num_prefill_tokens,
        request.num_decode_tokens,
        request.chunk_tokens,
    )


def test_an_answer_shorter_than_asked_is_recorded_as_it_was() -> None:
    with StreamingServer(behaviours=[Behaviour(num_tokens=2)]) as server:
        request = _only(_collect(server, _plan(1)))
    assert ("", 2) == (request.error, request.num_decode_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (Behaviour(status=503), "HTTP 503: no room"),
        (Behaviour(break_after=2), "Error"),
        (Behaviour(bad_event=True), "no JSON"),
        (Behaviour(hangs_s=30.0), "no end within 2 s"),
    ],
    ids=["refused", "broken off", "garbled", "hanging"],
)
def test_a_failure_is_recorded_and_the_rest_goes_on(behaviour: Behaviour, error: str) -> None:
    with StreamingServer(behaviours=[Behaviour(), behaviour, Behaviour()]) as server:
        run = _collect(server, _plan(3, 0.05), timeout_s=2.0)
    assert (2, 1) == (len(run.completed), run.num_failed)
    assert error in next(request.error for request in run.requests if request.error)


def test_requests_are_sent_on_time_however_slow_the_server() -> None:
    """An open loop: a server that answers none before all have come gets them all the same."""
    with StreamingServer(behaviours=[Behaviour(waits_for=6)]) as server:
        run = _collect(server, _plan(6, 0.03))
        assert server.num_under_way_max == 6
    assert [pytest.approx(0.03 * index) for index in range(6)] == [
        request.planned_s for request in run.requests
    ]
    assert all(request.arrival_s >= request.planned_s for request in run.requests)


def test_a_closed_loop_keeps_as_many_under_way() -> None:
    with StreamingServer(behaviours=[Behaviour(waits_for=3)]) as server:
        run = _collect(server, _plan(9, concurrency=3))
        assert server.num_under_way_max == 3
    assert (9, 3) == (len(run.completed), run.concurrency)


def test_a_limit_holds_requests_back() -> None:
    with StreamingServer(behaviours=[Behaviour(waits_for=2)]) as server:
        target = Target(url=server.url, model="tiny")
        run = collect_run(Collection(target=target, plan=_plan(6), num_warm_up=0, max_in_flight=2))
        assert server.num_under_way_max == 2
    assert len(run.completed) == 6


def test_turns_of_a_session_wait_for_the_answer_before() -> None:
    spec = WorkloadSpec(
        arrival="trace",
        trace_requests=(
            Request(arrival_s=0, num_prefill_tokens=4, num_decode_tokens=3, session=1),
            Request(arrival_s=0, num_prefill_tokens=12, num_decode_tokens=3, session=1),
        ),
    )
    with StreamingServer(behaviours=[Behaviour(delay_s=0.01)]) as server:
        run = _collect(server, resolve_workload(spec, (), 0))
        first, second = (body["prompt"] for body in server.bodies)
    assert run.requests[1].arrival_s >= run.requests[0].last_token_s
    assert first == second[:4]


@pytest.mark.parametrize("options", [{}, {"concurrency": "1"}])
def test_branches_run_side_by_side_and_what_joins_them_waits_for_both(
    options: dict[str, str],
) -> None:
    lengths = {"num_prefill_tokens": 4, "num_decode_tokens": 3}
    requests = [Request(arrival_s=0, after=after, **lengths) for after in ((), (0,), (0,), (1, 2))]
    spec = WorkloadSpec(arrival="trace", trace_requests=tuple(requests), arrival_options=options)
    behaviours = [Behaviour(), Behaviour(waits_for=3), Behaviour(waits_for=3)]
    with StreamingServer(behaviours=behaviours) as server:
        run = _collect(server, resolve_workload(spec, (), 0))
    root, one, other, joined = run.requests
    assert min(one.arrival_s, other.arrival_s) >= root.last_token_s
    assert max(one.arrival_s, other.arrival_s) < min(one.last_token_s, other.last_token_s)
    assert joined.arrival_s >= max(one.last_token_s, other.last_token_s)
    assert 0 == run.concurrency


def test_what_waits_for_a_failed_request_is_not_sent() -> None:
    lengths = {"num_prefill_tokens": 4, "num_decode_tokens": 3}
    requests = [Request(arrival_s=0, after=after, **lengths) for after in ((), (), (0, 1))]
    spec = WorkloadSpec(arrival="trace", trace_requests=tuple(requests))
    with StreamingServer(behaviours=[Behaviour(), Behaviour(status=500)]) as server:
        run = _collect(server, resolve_workload(spec, (), 0))
    assert 2 == len(run.requests)


def test_prompts_share_what_the_workload_shares() -> None:
    """Equal block hashes are equal tokens, and others are not; the run says so of whole blocks."""
    spec = WorkloadSpec(
        arrival="trace",
        hash_block_tokens=32,
        trace_requests=(
            Request(arrival_s=0, num_prefill_tokens=60, num_decode_tokens=2, block_hashes=(7, 8)),
            Request(arrival_s=0, num_prefill_tokens=60, num_decode_tokens=2, block_hashes=(7, 9)),
        ),
    )
    with StreamingServer() as server:
        run = _collect(server, resolve_workload(spec, (), 0))
        first, second = (body["prompt"] for body in server.bodies)
    assert first[:32] == second[:32]
    assert all(one != other for one, other in zip(first[32:], second[32:], strict=True))
    assert 16 == run.hash_block_tokens
    assert [(0, 1, 2), (0, 1, 3)] == sorted(request.block_hashes for request in run.requests)


@pytest.mark.parametrize("arrival", ["poisson", "closed_loop"])
def test_a_run_of_sessions_can_be_simulated_as_it_was_sent(arrival: str) -> None:
    """The run names what prompts share, turns and prefixes too, and keeps when turns were sent."""
    spec = WorkloadSpec(
        arrival=arrival,
        arrival_options={"concurrency": "2"} if arrival == "closed_loop" else {},
        rate_rps=1e6,
        num_requests=6,
        prefill=LengthSpec(mean=20),
        decode=LengthSpec(mean=6),
        sessions=SessionSpec(turns=LengthSpec(mean=3), shared_prefix_tokens=32),
    )
    with StreamingServer() as server:
        run = _collect(server, resolve_workload(spec, (), 0))
        prompts = [body["prompt"] for body in server.bodies]
    assert 0 == run.concurrency
    scenario = ServingScenario(model=load_model("llama-3.1-8b"), device="a30")
    plan = resolve_workload(scenario_of_run(scenario, run).workload, (), 0)
    assert [round(r.arrival_s * 1e9) for r in run.completed] == [
        time + round(run.completed[0].arrival_s * 1e9) for time in plan.arrival_ns.tolist()
    ]
    assert {1: 52 // 16, 2: 78 // 16, 3: 104 // 16} == {
        turn + 1: len(request.block_hashes)
        for turn, request in enumerate(
            sorted(run.requests, key=lambda r: r.num_prefill_tokens)[::2]
        )
    }
    blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(16, len(prompt) + 1, 16)}
    chains = {r.block_hashes[:end] for r in run.requests for end in range(1, 7)}
    assert len(blocks) == len(chains)


def test_a_run_says_no_more_than_its_prompts_hold() -> None:
    """An answer that a later turn names is not part of the prompt before it."""
    turns = (((1,), 20), ((1, 2, 3), 40))
    spec = WorkloadSpec(
        arrival="trace",
        hash_block_tokens=16,
        trace_requests=tuple(
            Request(
                arrival_s=0,
                num_prefill_tokens=length,
                num_decode_tokens=20,
                block_hashes=hashes,
                session=1,
            )
            for hashes, length in turns
        ),
    )
    with StreamingServer() as server:
        run = _collect(server, resolve_workload(spec, (), 0))
    assert [(0,), (0, 1)] == [request.block_hashes for request in run.requests]


def test_prompts_that_share_nothing_have_no_names() -> None:
    with StreamingServer() as server:
        run = _collect(server, _plan(2))
    assert ([(), ()], 0) == ([r.block_hashes for r in run.requests], run.hash_block_tokens)


def test_shared_prefixes_are_shared() -> None:
    sessions = SessionSpec(shared_prefix_tokens=5)
    plan = resolve_workload(WorkloadSpec(num_requests=2, rate_rps=1e6, sessions=sessions), (), 0)
    with StreamingServer() as server:
        _collect(server, plan)
        first, second = (body["prompt"] for body in server.bodies)
    assert first[:5] == second[:5]
    assert first[5:] != second[5:]


def test_each_kind_of_server_is_asked_in_its_own_words() -> None:
    with StreamingServer() as server:
        _collect(server, _plan(1))
        _collect(server, _plan(1), server="openai", api="chat", body={"top_k": 1})
        engine, plain = server.bodies
        assert server.paths[-2] == "/v1/chat/completions"
    assert (True, 6, 6) == (engine["ignore_eos"], engine["min_tokens"], engine["max_tokens"])
    assert all(isinstance(token, int) for token in engine["prompt"])
    assert not {"ignore_eos", "min_tokens", "prompt"} & set(plain)
    assert (20, 1) == (len(plain["messages"][0]["content"].split()), plain["top_k"])


def test_what_the_server_tells_of_itself_is_kept() -> None:
    pages = [
        _METRICS.format(preemptions=3.0, queries=100.0, hits=10.0),
        _METRICS.format(preemptions=5.0, queries=300.0, hits=60.0),
    ]
    with StreamingServer(metrics=pages) as server:
        run = _collect(server, _plan(1))
    assert (2, 500, 16, 0.25) == (
        run.num_preemptions,
        run.num_kv_blocks,
        run.kv_block_tokens,
        run.cached_token_ratio,
    )


def test_a_run_survives_its_file() -> None:
    with StreamingServer(behaviours=[Behaviour(), Behaviour(status=500)]) as server:
        run = _collect(server, _plan(2, 0.01))
    content = json.loads(encode_run(run))
    read = decode_run(content)
    assert encode_run(run) == encode_run(read)
    assert [r.error for r in run.requests] == [r.error for r in read.requests]


def test_ctrl_c_keeps_what_was_recorded() -> None:
    """What was done stays done, what was under way says that it was stopped."""
    behaviours = [Behaviour(), Behaviour(delay_s=0.2)]
    with StreamingServer(behaviours=behaviours) as server:
        threading.Thread(target=_interrupt_at, args=(server, 5), daemon=True).start()
        run = _collect(server, _plan(50, 0.1))
    assert run.is_interrupted
    assert 1 <= len(run.completed) < len(run.requests) < 50
    assert "interrupted" in {request.error for request in run.requests}


def _interrupt_at(server: StreamingServer, num_requests: int) -> None:
    """Press Ctrl-C when the server has got so many requests."""
    while len(server.bodies) < num_requests:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_no_server_is_said_at_once() -> None:
    target = Target(url="http://127.0.0.1:9", model="tiny")
    with pytest.raises(ServiceUnavailableError, match="no server answers"):
        collect_run(Collection(target=target, plan=_plan(1)))


def test_another_model_is_said_with_the_served_ones() -> None:
    with (
        StreamingServer(models=["small", "large"]) as server,
        pytest.raises(UnknownModelError, match="small"),
    ):
        _collect(server, _plan(1))


def test_a_server_that_lists_no_models_is_trusted() -> None:
    with StreamingServer(models=[]) as server:
        assert 1 == len(_collect(server, _plan(1)).completed)


def test_a_key_is_sent_and_a_wrong_one_is_said() -> None:
    with StreamingServer(api_key="secret") as server:
        assert 1 == len(_collect(server, _plan(1), api_key="secret").completed)
        with pytest.raises(UnauthenticatedError, match="API key"):
            _collect(server, _plan(1), api_key="other")


def test_a_server_that_fails_the_warm_up_is_not_asked_for_more() -> None:
    with StreamingServer(behaviours=[Behaviour(status=400)]) as server:
        target = Target(url=server.url, model="tiny")
        with pytest.raises(ServiceUnavailableError, match="HTTP 400: no room"):
            collect_run(Collection(target=target, plan=_plan(5)))
        assert 1 == len(server.bodies)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"url": "localhost:8000"}, "--url"),
        ({"api": "embeddings"}, "--api"),
        ({"server": "triton"}, "--server"),
        ({"timeout_s": 0.0}, "--timeout"),
    ],
)
def test_what_no_server_could_be_asked_with_is_refused(changes: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        Target(**{"url": "http://host", "model": "tiny", **changes})


def test_an_address_may_end_in_v1() -> None:
    assert "http://host:1" == Target(url="http://host:1/v1/", model="m").root


def test_unreadable_certificates_are_refused() -> None:
    target = Target(url="https://127.0.0.1:9", model="m", certificates="/nowhere.pem")
    with pytest.raises(InvalidRequestError, match="certificates"):
        asyncio.run(_open(target))


async def _open(target: Target) -> None:
    from foretoken.app.collect.sender import open_client

    await open_client(target).close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that is its own authority, with its key next to it."""
    return sign_itself(tmp_path_factory.mktemp("tls")).certificate


def test_certificates_are_verified_unless_told_otherwise(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with StreamingServer(tls=context) as server:
        with pytest.raises(ServiceUnavailableError, match="ertificate"):
            _collect(server, _plan(1))
        trusted = _collect(server, _plan(1), certificates=str(certificate))
        unverified = _collect(server, _plan(1), verifies_tls=False)
    assert (1, 1) == (len(trusted.completed), len(unverified.completed))
