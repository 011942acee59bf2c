"""How a channel is made: TLS, tokens, retries."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from certificates import sign_itself

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.client.channel import Connection, channel_arguments
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import ProfilerClient
from foretoken.domain.errors import InvalidRequestError, ServiceUnavailableError
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.wire.rpc import RpcTable
from foretoken.wire.rpcs import TABLES
from foretoken.wire.serving import register_service


class _Servicer:
    """Lists one device, and keeps what callers said about themselves."""

    def __init__(self) -> None:
        self.metadata: list[tuple[str, str | bytes]] = []
        self.identities: list[bytes] = []

    def list_local_devices(
        self, _request: profiler_pb2.ListLocalDevicesRequest, context: grpc.ServicerContext
    ) -> profiler_pb2.ListLocalDevicesResponse:
        self.metadata = list(context.invocation_metadata())
        self.identities = list(context.peer_identities() or ())
        return profiler_pb2.ListLocalDevicesResponse(devices=["cpu"])

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    sign_itself(folder)
    (folder / "token").write_text("secret\n")
    return folder


@pytest.fixture
def servicer() -> _Servicer:
    return _Servicer()


@pytest.fixture
def tls_address(certificates: Path, servicer: _Servicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    service = profiler_pb2.DESCRIPTOR.services_by_name["ProfilerService"]
    register_service(server, service, servicer)
    certificate = (certificates / "cert.pem").read_bytes()
    credentials = grpc.ssl_server_credentials(
        [((certificates / "key.pem").read_bytes(), certificate)],
        root_certificates=certificate,
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


def test_both_sides_show_certificates_and_a_token_travels(
    tls_address: str, certificates: Path, servicer: _Servicer
) -> None:
    options = ChannelOptions(
        address=tls_address,
        ca_file=str(certificates / "cert.pem"),
        cert_file=str(certificates / "cert.pem"),
        key_file=str(certificates / "key.pem"),
        token_file=str(certificates / "token"),
    )
    with ProfilerClient.connect(options) as client:
        assert client.list_local_devices() == ("cpu",)
    assert b"localhost" in servicer.identities
    assert ("authorization", "Bearer secret") in servicer.metadata


def test_a_caller_without_a_certificate_is_not_let_in(tls_address: str, certificates: Path) -> None:
    options = ChannelOptions(
        address=tls_address, ca_file=str(certificates / "cert.pem"), deadline_s=5.0
    )
    with ProfilerClient.connect(options) as client, pytest.raises(ServiceUnavailableError):
        client.create_profile(ProfileRequest(device="cpu"))


def test_a_token_does_not_travel_in_the_clear(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    options = ChannelOptions(address="localhost:1", token_file=str(token_file))
    with pytest.raises(InvalidRequestError, match="needs TLS"):
        Connection(options).open()


def test_a_missing_file_is_named() -> None:
    options = ChannelOptions(address="localhost:1", ca_file="/nowhere/ca.pem")
    with pytest.raises(InvalidRequestError, match=r"/nowhere/ca\.pem"):
        Connection(options).open()


def test_only_calls_that_change_nothing_are_retried() -> None:
    """A job whose creation was answered by a broken connection must not be created twice.

    A snapshot may: the same content is the same snapshot. So may a record, which has the job's id.
    """
    arguments = dict(channel_arguments(ChannelOptions(address="x")))
    config = json.loads(arguments["grpc.service_config"])
    retried = {entry["method"] for entry in config["methodConfig"][0]["name"]}
    changing = {name for name in retried if name.startswith(("Create", "Record", "Watch"))}
    assert changing == {"CreateJobRecord", "CreateSnapshot"}
    assert {"Predict", "GetJob", "DescribeCoverage"} <= retried


@pytest.mark.parametrize("table", TABLES)
def test_every_method_that_only_reads_is_retried(table: type[RpcTable]) -> None:
    reading = ("get_", "list_", "read_", "describe_")
    lines = table.lines()
    expected = {name for name in lines if name.startswith(reading)}
    assert expected == {name for name in expected if lines[name].is_idempotent}
