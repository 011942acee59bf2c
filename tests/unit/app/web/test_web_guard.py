"""Who may do what over HTTP: other sites nothing, who shows nothing what the server grants."""

import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from certificates import Authority
from web_client import WebClient, serve_home

from foretoken.app.config import ServerConfig
from foretoken.domain.errors import InvalidRequestError

_SERVICES = ("catalog",)
_CHECK = "/v1/catalog/create_check"


@pytest.fixture
def open_web(home_path: str) -> Iterator[WebClient]:
    with serve_home(Path(home_path), services=_SERVICES) as web:
        yield web


def test_pages_of_other_sites_change_nothing(open_web: WebClient) -> None:
    """A browser says where a request comes from, and by which name it found the server."""
    own = f"http://127.0.0.1:{open_web.port}"
    asked = {
        "own": open_web.post(_CHECK, {}, Origin=own, Sec_Fetch_Site="same-origin"),
        "no browser": open_web.post(_CHECK, {}),
        "other site": open_web.post(_CHECK, {}, Origin="https://example.com"),
        "sandboxed": open_web.post(_CHECK, {}, Origin="null"),
        "no address": open_web.post(_CHECK, {}, Origin="http://["),
        "same site": open_web.post(_CHECK, {}, Sec_Fetch_Site="same-site"),
        "form": open_web.send("POST", _CHECK, b"a=1", Content_Type="text/plain"),
        "rebound name": open_web.get("/v1/catalog/list_jobs", Host="example.com"),
    }
    assert {
        "own": 200,
        "no browser": 200,
        "other site": 403,
        "sandboxed": 403,
        "no address": 403,
        "same site": 403,
        "form": 415,
        "rebound name": 421,
    } == {name: answer.status for name, answer in asked.items()}


def test_every_answer_has_the_headers_that_keep_browsers_safe(open_web: WebClient) -> None:
    for path in ("/v1/catalog/list_jobs", "/healthz", "/nowhere", "/v1/catalog/get_job?job_id=x"):
        headers = open_web.get(path).headers
        assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
        assert "nosniff" == headers["X-Content-Type-Options"]
        assert "Access-Control-Allow-Origin" not in headers
        assert "unsafe-eval" not in headers["Content-Security-Policy"]


def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(http_port=0, http_max_bytes=1_000)
    with serve_home(tmp_path, config, _SERVICES) as web:
        assert 413 == web.post(_CHECK, {"snapshot": "x" * 2_000}).status
        assert 200 == web.post("/v1/catalog/list_jobs", {}).status


def test_probes_need_no_name_of_the_server(tmp_path: Path) -> None:
    config = ServerConfig(http_port=0, http_hosts=("foretoken.example",))
    with serve_home(tmp_path, config, _SERVICES) as web:
        paths = ("/healthz", "/v1/catalog/list_jobs")
        assert [200, 421] == [web.get(path, Host="10.0.0.7:8080").status for path in paths]


def test_signing_in_takes_a_token_and_no_more(tmp_path: Path) -> None:
    """The cookie is of TLS alone where the browser speaks it, be it to a proxy."""
    tokens = tmp_path / "tokens"
    tokens.write_text("aaaa\n")
    config = ServerConfig(http_port=0, token_file=str(tokens))
    with serve_home(tmp_path / "home", config, _SERVICES) as web:
        host = f"127.0.0.1:{web.port}"
        signed = {
            scheme: web.send("POST", "/sign-in", "token=aaaa", Origin=f"{scheme}://{host}")
            for scheme in ("http", "https")
        }
        assert 413 == web.send("POST", "/sign-in", "token=aaaa&" * 2_000).status
    assert {"http": 303, "https": 303} == {name: answer.status for name, answer in signed.items()}
    assert {"http": False, "https": True} == {
        name: "; Secure" in answer.headers["Set-Cookie"] for name, answer in signed.items()
    }


def test_tokens_give_roles(tmp_path: Path) -> None:
    """Of who shows a token its name counts; who shows none is refused."""
    tokens = tmp_path / "tokens"
    tokens.write_text("looker aaaa\nmaker bbbb\n")
    config = ServerConfig(
        http_port=0,
        token_file=str(tokens),
        callers={"looker": ("reader",), "maker": ("planner",)},
    )
    with serve_home(tmp_path / "home", config, _SERVICES) as web:
        statuses = [
            (
                web.get("/v1/catalog/list_jobs", **shown).status,
                web.post(_CHECK, {}, **shown).status,
            )
            for shown in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Bearer aaaa"},
                {"Authorization": "Bearer bbbb"},
                {"Cookie": "foretoken_token=bbbb"},
            )
        ]
        refused = web.get("/v1/catalog/list_jobs")
    assert [(401, 401), (401, 401), (200, 403), (200, 200), (200, 200)] == statuses
    assert 'Bearer realm="foretoken"' == refused.headers["WWW-Authenticate"]


def test_who_shows_nothing_reads_where_others_can_reach_it(tmp_path: Path) -> None:
    config = ServerConfig(http_port=0, host="0.0.0.0")  # noqa: S104 - what this is about
    with serve_home(tmp_path, config, _SERVICES) as web:
        assert 200 == web.get("/v1/catalog/list_jobs", Host="catalog.example").status
        assert 401 == web.post(_CHECK, {}).status


def test_a_certificate_names_its_caller(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("127.0.0.1")
    reader = authority.issue("somebody", uri="spiffe://cluster/reader")
    config = ServerConfig(
        http_port=0,
        tls_certificate_file=str(server.certificate),
        tls_key_file=str(server.key),
        tls_client_ca_file=str(authority.certificate),
        callers={"spiffe://cluster/reader": ("reader",)},
    )
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    tls.check_hostname = False
    with serve_home(tmp_path / "home", config, _SERVICES) as web:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            WebClient(web.port, tls).get("/v1/catalog/list_jobs")
        tls.load_cert_chain(reader.certificate, reader.key)
        client = WebClient(web.port, tls)
        assert 200 == client.get("/v1/catalog/list_jobs").status
        assert 403 == client.post(_CHECK, {}).status


def test_a_taken_port_says_what_to_do(open_web: WebClient, tmp_path: Path) -> None:
    config = ServerConfig(http_port=open_web.port)
    with (
        pytest.raises(InvalidRequestError, match="choose another with --http"),
        serve_home(tmp_path, config, _SERVICES),
    ):
        pass


_RUN = {"run_id": "slow", "kind": "RUN_KIND_IMPORT", "tool": "test", "source": "test"}
_LARGE = {"text": "select repeat('x', 100000) as text from range(1000)"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "num_missing", "begins"),
    [
        (f"/v1/catalog/record?run={quote(json.dumps(_RUN))}", b"x", 1, b"HTTP/1.1 504 "),
        ("/v1/catalog/query_sql", json.dumps(_LARGE).encode(), 0, b"HTTP/1.1 200 "),
    ],
)
def test_who_sends_or_reads_no_more_holds_no_thread(
    tmp_path: Path, path: str, body: bytes, num_missing: int, begins: bytes
) -> None:
    """Of one thread: who says nothing is refused, from who takes nothing the connection breaks."""
    config = ServerConfig(
        http_port=0, stream_idle_s=1, max_queued_calls=0, budgets={"QuerySql": 1, "Record": 1}
    )
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) + num_missing}\r\n\r\n"
    )
    with serve_home(tmp_path, config, _SERVICES) as web:
        address = ("127.0.0.1", web.port)
        with socket.create_connection(address, timeout=30) as held:
            held.sendall(head.encode() + body)
            assert begins == held.recv(len(begins))
            deadline = time.monotonic() + 30
            while (status := web.post(path, {"text": "select 1"}).status) == 429:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    assert status in (200, 400)
