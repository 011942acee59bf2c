"""What an operator sees of a serving process: health, reflection, metrics."""

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from foretoken.client.services import CatalogClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    command = [
        sys.executable, "-m", "foretoken.app", "--home", str(home),
        "serve", "catalog", "predictor", "--port", "0", "--metrics-port", str(metrics_port),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving ")
        yield line.removeprefix("serving ").strip()
        process.terminate()
        assert process.wait(timeout=15) == 0


@pytest.mark.parametrize(
    "service",
    [
        "",
        "foretoken.api.catalog.v1.CatalogService",
        "foretoken.api.predictor.v1.PredictorService",
    ],
)
def test_each_service_reports_its_health(address: str, service: str) -> None:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_what_is_served(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=10)))
    names = {service.name for service in answer.list_services_response.service}
    assert "foretoken.api.catalog.v1.CatalogService" in names
    assert "foretoken.api.predictor.v1.PredictorService" in names
    assert "foretoken.api.simulator.v1.SimulatorService" not in names


def test_calls_are_counted_and_timed(address: str, metrics_port: int) -> None:
    with CatalogClient.connect(address) as catalog:
        assert catalog.describe_coverage() == ()
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as page:
        text = page.read().decode()
    counted = 'foretoken_catalog_requests_total{code="OK",method="DescribeCoverage"} 1.0'
    assert counted in text
    assert 'foretoken_catalog_request_seconds_count{method="DescribeCoverage"} 1.0' in text


def test_a_taken_port_is_a_clear_error(address: str, tmp_path: Path) -> None:
    port = address.rsplit(":", 1)[1]
    command = [
        sys.executable, "-m", "foretoken.app", "--home", str(tmp_path),
        "serve", "catalog", "--port", port, "--metrics-port", "-1",
    ]  # fmt: skip
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in outcome.stderr


def test_a_taken_metrics_port_is_a_clear_error(
    address: str, metrics_port: int, tmp_path: Path
) -> None:
    """And nothing is left running or locked: the catalog is not even opened."""
    assert address
    command = [
        sys.executable, "-m", "foretoken.app", "--home", str(tmp_path),
        "serve", "catalog", "--port", "0", "--metrics-port", str(metrics_port),
    ]  # fmt: skip
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 1
    assert f"cannot listen on 127.0.0.1:{metrics_port}" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert list(tmp_path.iterdir()) == []
