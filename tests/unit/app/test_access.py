"""Who may call what: every rpc with every role, over real connections; and what is logged."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, Identity
from prometheus_client import CollectorRegistry

from foretoken.app.access import is_loopback
from foretoken.app.config import ServerConfig
from foretoken.app.serve import new_server
from foretoken.app.server_credentials import build_credentials
from foretoken.domain.caller import current_caller
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.rights import ROLES, Right
from foretoken.wire.rpcs import TABLES

_LINES = [(table.service, line) for table in TABLES for line in table.lines().values()]
# What nobody has who has no role for it, by rpc: the table said again, for it is the security.
_GUARDED = {
    Right.RECORD: {"Record", "StoreArtifact", "CreateProfile", "CreateGraphProfile",
                   "CreateClosure"},
    Right.PLAN: {"CreateSnapshot", "CreateCheck", "CreateTraining", "CreateCorrection",
                 "CreateServingSimulation", "CreateTrainingSimulation", "CreateCapacitySearch",
                 "CreateServingSearch", "PlanTrainingRun", "CreateTrainingSearch", "ResumeJob"},
    Right.CANCEL: {"CancelJob"},
    Right.ACTIVATE: {"ActivateArtifact", "ActivateModel"},
    Right.DELETE: {"DeleteSnapshot", "ReleaseSnapshot", "DeleteArtifact"},
    Right.SQL: {"QuerySql"},
    Right.BACKUP: {"Backup"},
    Right.WORK: {"CreateJobRecord", "LeaseJob", "UpdateJob", "StopJob", "ListJobRecords",
                 "GetJobRecord", "ReadJobFile"},
    Right.ADMIN: {"Prune", "Compact"},
}  # fmt: skip
_ROLES = {
    "reader": set(),
    "recorder": {Right.RECORD, Right.CANCEL},
    "planner": {Right.PLAN, Right.CANCEL},
    "admin": set(_GUARDED),
}
_SINGLE = ("activate", "backup", "cancel", "delete", "plan", "read", "record", "sql", "work")
_SHORT_S = 5.0


class _EveryMethod(grpc.GenericRpcHandler):
    """Answers whatever is asked with nothing: what is tested stands before it."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        known = {f"/{service}/{line.rpc_name}" for service, line in _LINES}
        if details.method not in known:
            return None
        return grpc.stream_stream_rpc_method_handler(_answer)


# Who made the calls that were answered.
_CALLERS: set[str] = set()


def _answer(_requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    _CALLERS.add(current_caller())
    yield b""


@contextmanager
def _served(config: ServerConfig, credentials: grpc.ServerCredentials | None) -> Iterator[int]:
    with ExitStack() as closing:
        server = new_server(config, CollectorRegistry(), closing)
        server.add_generic_rpc_handlers((_EveryMethod(),))
        port = (
            server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else server.add_secure_port("127.0.0.1:0", credentials)
        )
        server.start()
        yield port
        server.stop(None).wait()


def _ask(channel: grpc.Channel, path: str, **options: Any) -> str:
    """Return the status of a call."""
    ask = channel.stream_stream(path)
    try:
        list(ask(iter((b"",)), timeout=_SHORT_S, **options))
    except grpc.RpcError as err:
        return str(err.code().name)
    return "OK"


def _admitted(channel: grpc.Channel, **options: Any) -> set[str]:
    """Return which rpcs a caller may call; all others are refused as not allowed."""
    answers = {
        line.rpc_name: _ask(channel, f"/{service}/{line.rpc_name}", **options)
        for service, line in _LINES
    }
    assert set(answers.values()) <= {"OK", "PERMISSION_DENIED", "UNAUTHENTICATED"}
    return {name for name, status in answers.items() if status == "OK"}


def _expected(rights: set[Right]) -> set[str]:
    every = {line.rpc_name for _, line in _LINES}
    guarded = set().union(*_GUARDED.values())
    return (every - guarded) | set().union(*(_GUARDED[right] for right in rights))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("access"))


@pytest.fixture(scope="module")
def certified(authority: Authority) -> Iterator[tuple[int, Mapping[str, Identity]]]:
    """A server that wants certificates, and one of each role, of each right, and of a stranger."""
    served = authority.issue("served")
    names = (*ROLES, *_SINGLE)
    callers = {n: authority.issue(n, f"spiffe://foretoken/{n}") for n in (*names, "stranger")}
    config = ServerConfig(
        host="0.0.0.0",  # noqa: S104 - as pods listen; the test's port is a local one
        tls_certificate_file=str(served.certificate),
        tls_key_file=str(served.key),
        tls_client_ca_file=str(authority.certificate),
        callers={f"spiffe://foretoken/{name}": (name,) for name in names},
    )
    with _served(config, build_credentials(config)) as port:
        yield port, callers


def _channel(port: int, authority: Authority, caller: Identity) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(),
        caller.key.read_bytes(),
        caller.certificate.read_bytes(),
    )
    return grpc.secure_channel(f"localhost:{port}", credentials)


@pytest.mark.parametrize("role", ROLES)
def test_every_rpc_with_every_role(
    authority: Authority, certified: tuple[int, Mapping[str, Identity]], role: str
) -> None:
    port, callers = certified
    _CALLERS.clear()
    with _channel(port, authority, callers[role]) as channel:
        assert _expected(_ROLES[role]) == _admitted(channel)
    # The services know who called, for quotas.
    assert {f"spiffe://foretoken/{role}"} == _CALLERS


@pytest.mark.slow
@pytest.mark.parametrize("right", [right for right in Right if right.value in _SINGLE])
def test_every_rpc_with_every_right_alone(
    authority: Authority, certified: tuple[int, Mapping[str, Identity]], right: Right
) -> None:
    """SQL and backups are rights of their own, as are the others of services."""
    port, callers = certified
    with _channel(port, authority, callers[right.value]) as channel:
        expected = _GUARDED.get(right) or _expected(set())
        assert expected == _admitted(channel)


def test_who_has_a_certificate_and_no_role_may_nothing(
    authority: Authority, certified: tuple[int, Mapping[str, Identity]]
) -> None:
    port, callers = certified
    with _channel(port, authority, callers["stranger"]) as channel:
        assert set() == _admitted(channel)


@pytest.mark.parametrize(
    ("host", "callers", "rights"),
    [
        ("127.0.0.1", {}, set(_GUARDED)),
        ("0.0.0.0", {}, set()),  # noqa: S104
        ("0.0.0.0", {"anonymous": ("recorder",)}, {Right.RECORD, Right.CANCEL}),  # noqa: S104
    ],
)
def test_nobody_writes_unnamed_but_on_this_machine_or_where_it_is_granted(
    host: str, callers: Mapping[str, tuple[str, ...]], rights: set[Right]
) -> None:
    with (
        _served(ServerConfig(host=host, callers=callers), None) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        assert _expected(rights) == _admitted(channel)


def test_tokens_have_names_and_those_have_roles(tmp_path: Path) -> None:
    """Further tokens of the file are accepted meanwhile, so that they can be changed one by one."""
    path = tmp_path / "tokens"
    path.write_text("night-job first\nnight-job second\nguest third\nfourth\n")
    config = ServerConfig(
        token_file=str(path), callers={"night-job": ("recorder",), "*": ("reader",)}
    )
    method = "/foretoken.api.catalog.v1.CatalogService/Record"
    with (
        _served(config, None) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):

        def record(token: str) -> str:
            metadata = (("authorization", f"Bearer {token}"),)
            return _ask(channel, method, metadata=metadata)

        answers = [record(token) for token in ("first", "second", "third", "fourth", "fifth")]
        denied = "PERMISSION_DENIED"
        assert ["OK", "OK", denied, denied, "UNAUTHENTICATED"] == answers
        path.write_text("night-job second\n")
        time.sleep(1.1)
        assert ["UNAUTHENTICATED", "OK"] == [record("first"), record("second")]


def test_a_role_that_there_is_not_stops_the_start() -> None:
    with (
        pytest.raises(InvalidRequestError, match=r"no role or right: king; known are activate"),
        _served(ServerConfig(callers={"anonymous": ("king",)}), None),
    ):
        pass


def test_who_changed_what_is_logged_and_who_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(callers={"anonymous": ("recorder",)})
    catalog = "/foretoken.api.catalog.v1.CatalogService/"
    with (
        caplog.at_level(logging.INFO, "foretoken.audit"),
        _served(config, None) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        for name in ("ListRuns", "Record", "Prune"):
            _ask(channel, catalog + name)
    lines = [line.partition(" peer=")[0] for line in caplog.messages]
    assert [
        "caller=anonymous rpc=Record outcome=done",
        "refused caller=anonymous rpc=Prune",
    ] == lines


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost", True), ("127.0.0.53", True), ("::1", True), ("[::1]", True),
     ("unix:/tmp/x", True), ("::", False), ("10.0.0.1", False), ("192.168.1.1", False),
     ("catalog", False)],
)  # fmt: skip
def test_what_only_this_machine_reaches(host: str, is_local: bool) -> None:
    assert is_local == is_loopback(host)
