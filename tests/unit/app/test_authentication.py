"""A server with a token: who shows it is served, who does not is told what to do."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from foretoken.app.admission import TokenCheck
from foretoken.app.config import AppConfig, ServerConfig
from foretoken.app.serve import start_server
from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.catalog import CatalogClient
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import InvalidRequestError, UnauthenticatedError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import rows_to_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost, the right token and a wrong one."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        f" -keyout {folder}/key.pem -out {folder}/cert.pem -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not on this machine")
    (folder / "token").write_text("open sesame\n")
    (folder / "wrong").write_text("open wheat\n")
    return folder


@pytest.fixture
def port(folder: Path, tmp_path: Path) -> Iterator[int]:
    """A catalog behind the check, over TLS."""
    config = CatalogConfig(path=str(tmp_path / "catalog.duckdb"), state_folder=str(tmp_path))
    catalog = CatalogService(config)
    catalog.open()
    check = TokenCheck.read(str(folder / "token"))
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[check])
    servicer.register(server, catalog)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    pair = ((folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port
    server.stop(grace=None).wait()
    catalog.close()


def _client(port: int, folder: Path, token: str) -> CatalogClient:
    return CatalogClient.connect(
        ChannelOptions(
            address=f"127.0.0.1:{port}",
            ca_file=str(folder / "cert.pem"),
            token_file=str(folder / token) if token else "",
        )
    )


def _record(client: CatalogClient) -> int:
    run = Run(run_id="run", kind=RunKind.PROFILE, tool="tests")
    batch = MeasurementBatch(batch_index=0, rows=rows_to_table([]), is_last=True)
    return len(list(client.record(run, [batch])))


def test_who_shows_the_token_is_served(port: int, folder: Path) -> None:
    with _client(port, folder, "token") as client:
        assert _record(client) == 1
        assert ["run"] == [summary.run.run_id for summary in client.list_runs()]


@pytest.mark.parametrize("token", ["", "wrong"])
def test_others_are_refused_in_every_kind_of_call(port: int, folder: Path, token: str) -> None:
    """Single answers, and streams in both directions."""
    with _client(port, folder, token) as client:
        with pytest.raises(UnauthenticatedError, match=r"client\.token_file"):
            client.list_runs()
        with pytest.raises(UnauthenticatedError, match=r"client\.token_file"):
            _record(client)
        with pytest.raises(UnauthenticatedError, match=r"client\.token_file"):
            list(client.backup())


def test_a_method_that_does_not_exist_stays_unknown(port: int, folder: Path) -> None:
    """An answer of the check's own would let anybody make up methods, and series of metrics."""
    credentials = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        ask = channel.unary_unary("/foretoken.api.catalog.v1.CatalogService/MadeUp")
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_probes_need_no_token(port: int, folder: Path) -> None:
    credentials = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("content", "why"), [(None, "cannot read"), ("\n", "is empty")])
def test_a_file_without_a_token_stops_the_start(
    tmp_path: Path, content: str | None, why: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    server = ServerConfig(port=0, token_file=str(path))
    with pytest.raises(InvalidRequestError, match=why):
        start_server(("catalog",), AppConfig(home=str(tmp_path), server=server))
