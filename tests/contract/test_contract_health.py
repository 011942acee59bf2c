"""Clients spread their calls, and move away from a server that says it is not serving."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from contract_fakes import FakeProfiler
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import ProfilerClient
from foretoken.profiler import servicer as profiler_servicer


class _CountingProfiler(FakeProfiler):
    """Counts who was asked."""

    num_calls = 0

    def list_local_devices(self) -> tuple[str, ...]:
        self.num_calls += 1
        return super().list_local_devices()


class _Pod:
    """One of several servers of the same service."""

    def __init__(self, folder: Path) -> None:
        self.profiler = _CountingProfiler(folder)
        self.health = health.HealthServicer()
        self.server = grpc.server(ThreadPoolExecutor(4))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        profiler_servicer.register(self.server, self.profiler)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.server.start()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[_Pod]]:
    pods = [_Pod(tmp_path / name) for name in ("a", "b")]
    yield pods
    for pod in pods:
        pod.server.stop(grace=None).wait()


@pytest.fixture
def client(pods: list[_Pod]) -> Iterator[ProfilerClient]:
    targets = ",".join(f"127.0.0.1:{pod.port}" for pod in pods)
    with ProfilerClient.connect(ChannelOptions(address=f"ipv4:{targets}")) as client:
        yield client


def _calls(client: ProfilerClient, pods: list[_Pod], num: int) -> list[int]:
    before = [pod.profiler.num_calls for pod in pods]
    for _ in range(num):
        client.list_local_devices()
    return [pod.profiler.num_calls - b for pod, b in zip(pods, before, strict=True)]


def _call_until(
    client: ProfilerClient, pods: list[_Pod], wanted: list[int], patience_s: float = 60.0
) -> list[int]:
    """What four calls hit, once the client noticed; what it last was where it never does."""
    deadline = time.monotonic() + patience_s
    while (hits := _calls(client, pods, 4)) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return hits


def test_calls_go_round(client: ProfilerClient, pods: list[_Pod]) -> None:
    assert _call_until(client, pods, [2, 2]) == [2, 2]


def test_a_server_that_is_not_serving_gets_no_calls(
    client: ProfilerClient, pods: list[_Pod]
) -> None:
    """What a stopping pod reports during its drain; its port still answers."""
    assert _call_until(client, pods, [2, 2]) == [2, 2]
    pods[0].health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert _call_until(client, pods, [0, 4]) == [0, 4]
    pods[0].health.set("", health_pb2.HealthCheckResponse.SERVING)
    assert _call_until(client, pods, [2, 2]) == [2, 2]
