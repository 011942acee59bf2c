"""Logs as operators read them, and metrics of real calls."""

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from foretoken.app.config import LogConfig
from foretoken.app.observed_handler import ObservedCalls
from foretoken.app.request_metrics import RequestMetrics
from foretoken.app.telemetry.commands import configure_logging
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import ProfilerClient
from foretoken.domain.errors import UnknownJobError
from foretoken.domain.job import Job
from foretoken.profiler.servicer import SERVICE, ProfilerServicer
from foretoken.wire.serving import register_service


class _Profiler:
    """Knows one device and no job."""

    def list_local_devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def get_job(self, job_id: str) -> Job:
        raise UnknownJobError.named(job_id, ())


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def address(registry: CollectorRegistry) -> Iterator[str]:
    calls = ObservedCalls(RequestMetrics(registry).observe_call)
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[calls])
    register_service(server, SERVICE, ProfilerServicer(_Profiler()))  # type: ignore[arg-type]
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


@pytest.fixture
def _root_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _requests(registry: CollectorRegistry, method: str, code: str) -> float | None:
    labels = {"method": method, "code": code}
    return registry.get_sample_value("foretoken_profiler_requests_total", labels)


class _PatientRegistry(CollectorRegistry):
    """Lets a second caller come to a metric that the first is about to register."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def register(self, collector: Collector) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.2)
        super().register(collector)


def test_two_first_calls_at_once_are_counted_together() -> None:
    registry = _PatientRegistry()
    metrics = RequestMetrics(registry)
    method = f"/{SERVICE.full_name}/GetJob"
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(metrics.count_refused, [method] * 2))
    name = "foretoken_profiler_refused_requests_total"
    assert registry.get_sample_value(name, {"method": "GetJob"}) == 2.0


def test_calls_are_counted_by_their_status(address: str, registry: CollectorRegistry) -> None:
    with ProfilerClient.connect(ChannelOptions(address=address)) as client:
        client.list_local_devices()
        client.list_local_devices()
        with pytest.raises(UnknownJobError):
            client.get_job("nobody")
        with pytest.raises(UnknownJobError):
            list(client.watch_job("nobody"))
    assert _requests(registry, "ListLocalDevices", "OK") == 2.0
    assert _requests(registry, "GetJob", "NOT_FOUND") == 1.0
    assert _requests(registry, "WatchJob", "NOT_FOUND") == 1.0
    in_flight = {"method": "GetJob"}
    assert registry.get_sample_value("foretoken_profiler_requests_in_flight", in_flight) == 0.0
    seconds = registry.get_sample_value("foretoken_profiler_request_seconds_sum", in_flight)
    assert seconds is not None
    assert seconds > 0.0


def test_probes_are_not_counted(address: str, registry: CollectorRegistry) -> None:
    with grpc.insecure_channel(address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert [] == list(registry.collect())


@pytest.mark.usefixtures("_root_logging")
def test_json_logs_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(format="json"))
    lost = ValueError("lost")
    logging.getLogger("foretoken.test").error("went wrong thing=%d", 3, exc_info=lost)
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["message"]) == ("ERROR", "went wrong thing=3")
    assert "ValueError: lost" in entry["exception"]


@pytest.mark.usefixtures("_root_logging")
def test_tries_of_one_call_to_a_cluster_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig())
    for name in ("urllib3.connectionpool", "foretoken.profiler"):
        logging.getLogger(name).warning("of %s", name)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("of foretoken.profiler")


@pytest.mark.usefixtures("_root_logging")
def test_quiet_keeps_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(level="DEBUG"), quiet=True)
    logging.getLogger("foretoken.test").info("chatter")
    logging.getLogger("foretoken.test").warning("matters")
    captured = capsys.readouterr()
    assert "chatter" not in captured.err
    assert "matters" in captured.err
    assert captured.out == ""
