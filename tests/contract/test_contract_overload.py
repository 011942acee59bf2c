"""A server with more calls than it takes: all others are answered, health first of all."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_calls import RawCalls, methods, path, retry_delay_s

from foretoken.app.compose import Composition
from foretoken.app.config import SERVICES, AppConfig, EndpointsConfig, ServerConfig
from foretoken.app.serve import start_server
from foretoken.client.facade import Foretoken
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.wire.arrow import read_table

pytestmark = pytest.mark.slow

_RECORD = "/foretoken.api.catalog.v1.CatalogService/Record"
_NUM_STREAMS = 500
_RETRY_AFTER_S = 2.5
_BUDGETS = {"Record": 30, "WatchJob": 25}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """All four services, whose silent calls are not ended while the tests run."""
    server = ServerConfig(
        port=0,
        budgets=_BUDGETS,
        retry_after_s=_RETRY_AFTER_S,
        first_message_s=3_600.0,
        stream_idle_s=3_600.0,
    )
    config = AppConfig(home=str(tmp_path_factory.mktemp("home")), server=server)
    running = start_server(SERVICES, config)
    yield f"127.0.0.1:{running.port}"
    running.stop(ServerConfig(grace_s=0.0))


@pytest.fixture
def raw(address: str) -> Iterator[RawCalls]:
    with grpc.insecure_channel(address) as channel:
        calls = RawCalls(channel)
        yield calls
        calls.close()


@pytest.fixture
def foretoken(address: str, tmp_path: Path) -> Iterator[Foretoken]:
    endpoints = EndpointsConfig(**dict.fromkeys(SERVICES, address))
    config = AppConfig(home=str(tmp_path), endpoints=endpoints)
    with Composition(config) as composition:
        yield composition.foretoken(*SERVICES)


def _wait_until(has_happened: Callable[[], bool], patience_s: float = 60.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not has_happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return has_happened()


def _check_all_answer(address: str, foretoken: Foretoken) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "foretoken.api.catalog.v1.CatalogService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    estimate = foretoken.predict("gemm", device="a30", dtype=DType.BF16, m=64, n=4096, k=4096)
    assert estimate.latency_us > 0.0
    assert foretoken.catalog.list_runs() == ()
    assert foretoken.coverage() == ()
    assert foretoken.simulator.list_jobs() == ()
    assert foretoken.profiler.list_jobs() == ()


def test_five_hundred_silent_streams_stop_nothing_else(
    address: str, raw: RawCalls, foretoken: Foretoken
) -> None:
    """Of all methods that stream; what is beyond a budget is refused and hears when to return."""
    streaming = [
        path(one)
        for one in methods()
        if (one.client_streaming or one.server_streaming) and "health" not in path(one)
    ]
    assert len(streaming) >= 17
    ended: Counter[tuple[str, grpc.StatusCode]] = Counter()
    delays: set[float] = set()
    lock = threading.Lock()

    def end(method: str, call: Any) -> None:
        with lock:
            ended[method, call.code()] += 1
            delays.add(retry_delay_s(call))

    opened: Counter[str] = Counter()
    for number in range(_NUM_STREAMS):
        # As many of Record as of all others, which go round.
        method = _RECORD if number % 2 else streaming[number // 2 % len(streaming)]
        opened[method] += 1
        call = raw.open_silent(method)
        call.add_done_callback(lambda call, method=method: end(method, call))

    num_refused = opened[_RECORD] - _BUDGETS["Record"]
    refused = (_RECORD, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert _wait_until(lambda: ended[refused] == num_refused)
    _check_all_answer(address, foretoken)
    assert read_table(foretoken.catalog.query_sql(SqlQuery(text="SELECT 1 AS one"))).num_rows == 1
    assert {code for _, code in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert ended[refused] == num_refused
    assert delays == {_RETRY_AFTER_S}


def test_silent_calls_of_every_other_method_stop_nothing_else(
    address: str, raw: RawCalls, foretoken: Foretoken
) -> None:
    """A call that never sends its one message holds a thread, as a stream does."""
    others = [path(one) for one in methods() if not one.client_streaming]
    for method in others:
        for _ in range(4):
            raw.open_silent(method)
    _check_all_answer(address, foretoken)
