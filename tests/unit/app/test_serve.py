"""A server: who may call it, its health, and its limits on time."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from hypothesis import given
from hypothesis import strategies as st

from foretoken.app.access import is_open
from foretoken.app.call_guard import TimeLimits
from foretoken.app.config import AppConfig, ServerConfig
from foretoken.app.lane import Lane
from foretoken.app.serve import HealthServicer, start_server
from foretoken.app.tokens import FileTokens, TokenCheck, Tokens
from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import InvalidRequestError, UnauthenticatedError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import rows_to_table

_LONG_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of an authority, the right token and a wrong one."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    served = authority.issue("served")
    for path, name in (
        (authority.certificate, "ca.pem"),
        (served.certificate, "cert.pem"),
        (served.key, "key.pem"),
    ):
        path.rename(folder / name)
    (folder / "token").write_text("open-sesame\n")
    (folder / "wrong").write_text("open-wheat\n")
    return folder


@pytest.fixture
def port(folder: Path, tmp_path: Path, catalog_path: str) -> Iterator[int]:
    """A catalog behind the check, over TLS."""
    config = CatalogConfig(path=catalog_path, state_folder=str(tmp_path))
    catalog = CatalogService(config)
    catalog.open()
    check = TokenCheck(Tokens(FileTokens(str(folder / "token"))), is_open)
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
            ca_file=str(folder / "ca.pem"),
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
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        ask = channel.unary_unary("/foretoken.api.catalog.v1.CatalogService/MadeUp")
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_probes_need_no_token(port: int, folder: Path) -> None:
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
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


class _Call:
    """A watcher's call: keeps what to do when it ends."""

    def __init__(self) -> None:
        self.has_ended: Callable[[], None] = lambda: None

    def add_callback(self, callback: Callable[[], None]) -> None:
        self.has_ended = callback


def test_a_watcher_that_leaves_during_a_change_holds_nothing_up() -> None:
    """As in grpcio: an answer waits for the thread that learns that the call has ended."""
    servicer, call = HealthServicer(), _Call()
    is_held_up: list[bool] = []

    def answer(response: HealthCheckResponse | None) -> None:
        if response and response.status == HealthCheckResponse.NOT_SERVING:
            server = threading.Thread(target=call.has_ended, daemon=True)
            server.start()
            server.join(_LONG_S)
            is_held_up.append(server.is_alive())

    servicer.Watch(HealthCheckRequest(service=""), cast("grpc.ServicerContext", call), answer)
    servicer.enter_graceful_shutdown()
    assert is_held_up == [False]


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_action_is_done_once_and_not_before_its_time() -> None:
    clock = _Clock()
    limits = TimeLimits(clock)
    done: list[str] = []
    with limits.act_after(5.0, lambda: done.append("late")):
        limits.act()
        clock.now_s = 4.9
        limits.act()
        assert [] == done
        clock.now_s = 5.0
        limits.act()
        limits.act()
        assert ["late"] == done
    assert ["late"] == done


def test_nothing_is_done_about_what_has_ended() -> None:
    clock = _Clock()
    limits = TimeLimits(clock)
    done: list[str] = []
    with limits.act_after(5.0, lambda: done.append("inner")):
        pass
    clock.now_s = 10.0
    limits.act()
    assert [] == done


def test_each_block_has_its_own_time() -> None:
    clock = _Clock()
    limits = TimeLimits(clock)
    done: list[str] = []
    with (
        limits.act_after(5.0, lambda: done.append("outer")),
        limits.act_after(2.0, lambda: done.append("inner")),
    ):
        clock.now_s = 3.0
        limits.act()
        assert ["inner"] == done
        clock.now_s = 6.0
        limits.act()
    assert ["inner", "outer"] == done


@given(st.integers(1, 5), st.integers(0, 5), st.lists(st.booleans(), max_size=60))
def test_a_lane_never_holds_more_calls_than_threads_and_queue(
    num_threads: int, max_queued: int, comes: list[bool]
) -> None:
    lane = Lane("/service/Method", num_threads, max_queued)
    expected = 0
    for is_new in comes:
        if is_new:
            has_room = expected < num_threads + max_queued
            assert has_room == lane.enter()
            expected += has_room
        elif expected:
            lane.leave()
            expected -= 1
        assert expected == lane.num_calls
