"""One request over several services: its id in logs and errors, its spans at a collector."""

import asyncio
import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from loopback import serve
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry
from web_client import WebClient

from foretoken.app.config import AppConfig, LogConfig, ServerConfig, TracingConfig
from foretoken.app.observed_handler import ObservedCalls
from foretoken.app.serve import serve_web
from foretoken.app.telemetry.call_log import ALL, FAILED, CallLog
from foretoken.app.telemetry.commands import log_formatter, trace_command
from foretoken.app.telemetry.spans import start_tracing
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import AsyncProfilerClient, ProfilerClient
from foretoken.domain.errors import ForetokenError, InvalidRequestError, UnknownJobError
from foretoken.domain.job import Job
from foretoken.profiler.servicer import register
from foretoken.wire import trace

_SERVICE = "foretoken.api.profiler.v1.ProfilerService"


class _Last:
    """Knows no job, and breaks."""

    def get_job(self, job_id: str) -> Job:
        raise UnknownJobError.named(job_id, ())

    def list_jobs(self) -> tuple[Job, ...]:
        raise ZeroDivisionError("broken")

    def list_local_devices(self) -> tuple[str, ...]:
        return ("cpu",)


class _First:
    """Has all its answers from the last."""

    def __init__(self, client: ProfilerClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@contextmanager
def _chain() -> Iterator[ChannelOptions]:
    """Serve one service that calls another; at the end all calls have ended."""
    with (
        serve(register, _Last(), logged_calls=ALL) as last,
        ProfilerClient.connect(last) as client,
        serve(register, _First(client), logged_calls=ALL) as first,
    ):
        yield first


@pytest.fixture
def first() -> Iterator[ChannelOptions]:
    """Where a service answers that calls another."""
    with _chain() as options:
        yield options


Lines = Callable[[], list[dict[str, str]]]


@pytest.fixture
def logs() -> Iterator[Lines]:
    """What was logged, a mapping a line."""
    logger = logging.getLogger("foretoken")
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(log_formatter(LogConfig(format="json")))
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def _accesses(logs: Lines, count: int) -> list[dict[str, str]]:
    """Return the lines of so many calls: a caller has its answer before the call is logged."""
    end_s = time.monotonic() + 60.0
    while True:
        lines = [line for line in logs() if line["logger"] == "foretoken.access"]
        if len(lines) >= count or time.monotonic() > end_s:
            return lines
        time.sleep(0.005)


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans it is sent, with the name of their service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the proto's name
        del context
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[_Collector, TracingConfig]]:
    server = grpc.server(ThreadPoolExecutor(1))
    found = _Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found, TracingConfig(otlp_endpoint=f"http://127.0.0.1:{port}")
    server.stop(grace=None).wait()


def test_an_error_names_the_request_by_which_every_service_has_logged_it(
    first: ChannelOptions, logs: Lines
) -> None:
    with ProfilerClient.connect(first) as client, pytest.raises(UnknownJobError) as caught:
        client.get_job("nobody")
    lines = _accesses(logs, 2)
    assert 32 == len(caught.value.trace_id)
    assert [caught.value.trace_id] * 2 == [line["trace_id"] for line in lines]
    for line in lines:
        assert line["message"].startswith(f"rpc={_SERVICE}/GetJob code=NOT_FOUND seconds=0.")
        assert " caller=anonymous peer=ipv4:127.0.0.1:" in line["message"]


def test_what_breaks_is_logged_with_the_request_it_broke(
    first: ChannelOptions, logs: Lines
) -> None:
    with ProfilerClient.connect(first) as client, pytest.raises(ForetokenError) as caught:
        client.list_jobs()
    (line,) = [line for line in logs() if "exception" in line]
    assert caught.value.trace_id == line["trace_id"]
    assert "ZeroDivisionError: broken" in line["exception"]


def test_calls_of_a_command_are_one_request(first: ChannelOptions, logs: Lines) -> None:
    end = trace_command(TracingConfig(), "profile")
    request = trace.current()
    with ProfilerClient.connect(first) as client:
        client.list_local_devices()
        client.list_local_devices()
    end()
    assert request is not None
    lines = _accesses(logs, 4)
    assert [request.trace_id] * 4 == [line["trace_id"] for line in lines]
    assert trace.current() is None


def test_of_the_calls_those_that_failed_have_a_line(logs: Lines) -> None:
    with (
        serve(register, _Last(), logged_calls=FAILED) as options,
        ProfilerClient.connect(options) as client,
    ):
        client.list_local_devices()
        with pytest.raises(UnknownJobError):
            list(client.watch_job("nobody"))
    (line,) = _accesses(logs, 1)
    assert "/WatchJob code=NOT_FOUND" in line["message"]


def test_a_collector_is_sent_the_spans_of_both_sides(
    collector: tuple[_Collector, TracingConfig],
) -> None:
    """A call of a call: four spans of one request, each within the one before."""
    found, config = collector
    stop = start_tracing(config, "tests")
    try:
        with (
            _chain() as first,
            ProfilerClient.connect(first) as client,
            pytest.raises(UnknownJobError),
        ):
            client.get_job("nobody")
    finally:
        stop()
    spans = [span for _, span in found.spans]
    assert {"foretoken-tests"} == {service for service, _ in found.spans}
    assert [f"{_SERVICE}/GetJob"] * 4 == [span.name for span in spans]
    by_parent = {span.parent_span_id: span for span in spans}
    chain = [by_parent[b""]]
    while chain[-1].span_id in by_parent:
        chain.append(by_parent[chain[-1].span_id])
    # As OTLP numbers them: 3 is a client's, 2 a server's.
    assert [3, 2, 3, 2] == [span.kind for span in chain]
    assert 1 == len({span.trace_id for span in spans})
    attributes = {a.key: a.value.string_value for a in chain[1].attributes}
    assert {
        "rpc.system.name": "grpc",
        "rpc.method": f"{_SERVICE}/GetJob",
        "rpc.response.status_code": "NOT_FOUND",
        "enduser.id": "anonymous",
    } == attributes
    # Whoever called was refused; the server did nothing wrong.
    assert [2, 0, 2, 0] == [span.status.code for span in chain]


def test_the_share_of_requests_is_the_same_for_every_service(
    collector: tuple[_Collector, TracingConfig],
) -> None:
    found, config = collector
    stop = start_tracing(TracingConfig(otlp_endpoint=config.otlp_endpoint, sample_ratio=0.5), "t")
    try:
        with _chain() as first, ProfilerClient.connect(first) as client:
            for _ in range(20):
                client.list_local_devices()
    finally:
        stop()
    assert 0 < len(found.spans) < 80
    assert 0 == len(found.spans) % 4


async def _ask(options: ChannelOptions) -> str:
    client = AsyncProfilerClient.connect(options)
    try:
        with pytest.raises(UnknownJobError) as caught:
            await client.get_job("nobody")
    finally:
        await client.close()
    return caught.value.trace_id


def test_calls_that_are_awaited_have_spans_too(
    collector: tuple[_Collector, TracingConfig],
) -> None:
    found, config = collector
    stop = start_tracing(config, "tests")
    try:
        with _chain() as first:
            trace_id = asyncio.run(_ask(first))
    finally:
        stop()
    assert [bytes.fromhex(trace_id)] * 4 == [span.trace_id for _, span in found.spans]


class _Ports:
    profiler = _Last()


def test_an_answer_over_http_names_its_request(logs: Lines) -> None:
    registry = CollectorRegistry()
    config = AppConfig(server=ServerConfig(http_port=0), log=LogConfig(calls=ALL))
    server = serve_web(config, ("profiler",), _Ports(), registry)  # type: ignore[arg-type]
    parent = trace.TraceContext.new()
    try:
        client = WebClient(server.port)
        path = "/v1/profiler/get_job?job_id=nobody"
        answer = client.get(path, traceparent=parent.traceparent)
        labels = {"method": "GET /v1/profiler/get_job", "code": "404"}
        counted = registry.get_sample_value("foretoken_web_requests_total", labels)
    finally:
        server.close()
    assert 404 == answer.status
    # It is counted by its route, as long as there is the server.
    assert 1.0 == counted
    assert None is registry.get_sample_value("foretoken_web_requests_total", labels)
    assert [parent.trace_id] * 2 == [answer.json["trace_id"], answer.headers["X-Request-Id"]]
    (line,) = _accesses(logs, 1)
    assert parent.trace_id == line["trace_id"]
    route = "http=GET route=/v1/profiler/get_job code=404 seconds=0."
    assert line["message"].startswith(route)
    assert " caller=anonymous peer=http:127.0.0.1" in line["message"]


def test_a_collector_needs_an_address_that_can_be_called() -> None:
    with pytest.raises(InvalidRequestError, match="begins with http"):
        TracingConfig(otlp_endpoint="collector:4317")
    with pytest.raises(InvalidRequestError, match="from 0 to 1"):
        TracingConfig(sample_ratio=1.5)


def test_probes_are_no_requests() -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: None)
    details = type("Details", (), {"method": "/grpc.health.v1.Health/Check"})()
    assert handler is ObservedCalls(CallLog(ALL).observe_call).intercept_service(
        lambda _: handler, details
    )
