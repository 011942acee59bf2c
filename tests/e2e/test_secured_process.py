"""Serving processes with TLS, certificates of both sides and a token; and probes in the clear."""

import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml
from certificates import Authority, Identity
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import ServiceUnavailableError, UnauthenticatedError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import rows_to_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SHORT_S = 2.0
# Files are looked at once a second.
_NOTICED_S = 1.1


@dataclass(frozen=True)
class _Secured:
    """A catalog of a process, who vouches for it, and a caller it accepts."""

    address: str
    health_address: str
    authority: Authority
    served: Identity
    caller: Identity
    token: Path

    def connect(self, **changes: object) -> CatalogClient:
        options = {
            "ca_file": str(self.authority.certificate),
            "cert_file": str(self.caller.certificate),
            "key_file": str(self.caller.key),
            "token_file": str(self.token),
            "deadline_s": _SHORT_S,
            **changes,
        }
        return CatalogClient.connect(ChannelOptions(address=self.address, **options))  # type: ignore[arg-type]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    served, caller = authority.issue("catalog"), authority.issue("caller")
    token = folder / "token"
    token.write_text("open-sesame\n")
    health_port = _free_port()
    config = folder / "foretoken.yaml"
    server = {
        "port": 0,
        "metrics_port": -1,
        "health_port": health_port,
        "drain_s": 2.0,
        "tls_certificate_file": str(served.certificate),
        "tls_key_file": str(served.key),
        "tls_client_ca_file": str(authority.certificate),
        "token_file": str(token),
    }
    config.write_text(yaml.safe_dump({"home": str(folder / "home"), "server": server}))
    command = [sys.executable, "-m", "foretoken.app", "--config", str(config), "serve", "catalog"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("serving ").strip()
        health_address = f"127.0.0.1:{health_port}"
        yield _Secured(address, health_address, authority, served, caller, token)
        process.terminate()
        # Whoever probes learns that it is going before it is gone.
        assert _wait_for_health(health_address, HealthCheckResponse.NOT_SERVING)
        assert process.wait(timeout=15) == 0


def _health(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        answer = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=_SHORT_S)
    return int(answer.status)


def _wait_for_health(address: str, status: int) -> bool:
    for _ in range(20):
        if _health(address) == status:
            return True
        time.sleep(0.05)
    return False


def test_a_caller_with_certificate_and_token_is_served(secured: _Secured) -> None:
    with secured.connect() as catalog:
        assert catalog.describe_coverage() == ()


def test_a_caller_without_the_token_is_refused(secured: _Secured) -> None:
    with secured.connect(token_file="") as catalog, pytest.raises(UnauthenticatedError):
        catalog.describe_coverage()


def test_a_caller_without_a_certificate_of_the_authority_gets_no_connection(
    secured: _Secured, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path, "foreign").issue("caller")
    for changes in (
        {"cert_file": "", "key_file": ""},
        {"cert_file": str(foreign.certificate), "key_file": str(foreign.key)},
    ):
        with secured.connect(**changes) as catalog, pytest.raises(ServiceUnavailableError):
            catalog.describe_coverage()


@pytest.mark.parametrize("service", ["", "foretoken.api.catalog.v1.CatalogService"])
def test_health_is_answered_in_the_clear(secured: _Secured, service: str) -> None:
    """As a kubelet does: without TLS, without a token."""
    assert HealthCheckResponse.SERVING == _health(secured.health_address, service)


@pytest.mark.parametrize(
    "method",
    [
        "foretoken.api.catalog.v1.CatalogService/DescribeCoverage",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_the_port_of_health_answers_nothing_else(secured: _Secured, method: str) -> None:
    with grpc.insecure_channel(secured.health_address) as channel:
        ask = channel.unary_unary(f"/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"", timeout=_SHORT_S)
    assert grpc.StatusCode.UNIMPLEMENTED == caught.value.code()


def test_the_port_of_calls_answers_nothing_in_the_clear(secured: _Secured) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _health(secured.address)
    assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def test_a_renewed_certificate_is_shown_to_who_comes_next(secured: _Secured) -> None:
    """And a connection from before goes on."""
    context = ssl.create_default_context(cafile=secured.authority.certificate)
    context.load_cert_chain(secured.caller.certificate, secured.caller.key)
    context.set_alpn_protocols(["h2"])
    host, port = secured.address.rsplit(":", 1)

    def shown() -> bytes | None:
        with (
            socket.create_connection((host, int(port)), _SHORT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            return connection.getpeercert(binary_form=True)

    with secured.connect() as catalog:
        catalog.describe_coverage()
        before = shown()
        secured.authority.issue("catalog")
        for _ in range(50):
            if (after := shown()) != before:
                break
            time.sleep(0.1)
        assert before != after
        assert catalog.describe_coverage() == ()


def test_a_renewed_token_is_the_one_that_is_wanted(secured: _Secured, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    earlier.write_text(secured.token.read_text())
    secured.token.write_text("open-barley\n")
    time.sleep(_NOTICED_S)
    with secured.connect() as catalog:
        assert catalog.describe_coverage() == ()
    with secured.connect(token_file=str(earlier)) as catalog, pytest.raises(UnauthenticatedError):
        catalog.describe_coverage()


def test_a_caller_shows_its_renewed_certificate_and_drops_no_call(
    secured: _Secured, tmp_path: Path
) -> None:
    """As long as it shows a foreign one, new calls fail; the one under way goes on."""
    shown = Identity(tmp_path / "tls.crt", tmp_path / "tls.key")
    foreign = Authority(tmp_path, "foreign").issue("caller")

    def show(identity: Identity) -> None:
        for source, target in zip(identity, shown, strict=True):
            shutil.copy(source, target)
        time.sleep(_NOTICED_S)

    def batches(catalog: CatalogClient) -> Iterator[MeasurementBatch]:
        yield MeasurementBatch(batch_index=0, rows=rows_to_table([]), is_last=False)
        show(foreign)
        with pytest.raises(ServiceUnavailableError):
            catalog.describe_coverage()
        yield MeasurementBatch(batch_index=1, rows=rows_to_table([]), is_last=True)

    shutil.copy(secured.caller.certificate, shown.certificate)
    shutil.copy(secured.caller.key, shown.key)
    changes = {"cert_file": str(shown.certificate), "key_file": str(shown.key)}
    with secured.connect(**changes) as catalog:
        run = Run(run_id="run", kind=RunKind.PROFILE, tool="tests")
        assert [0, 1] == [ack.batch_index for ack in catalog.record(run, batches(catalog))]
        show(secured.caller)
        assert ["run"] == [summary.run.run_id for summary in catalog.list_runs()]


def test_a_caller_shows_its_renewed_token(secured: _Secured, tmp_path: Path) -> None:
    shown = tmp_path / "token"
    shown.write_text(secured.token.read_text())
    with secured.connect(token_file=str(shown)) as catalog:
        assert catalog.describe_coverage() == ()
        shown.write_text("open-rye\n")
        time.sleep(_NOTICED_S)
        with pytest.raises(UnauthenticatedError):
            catalog.describe_coverage()
