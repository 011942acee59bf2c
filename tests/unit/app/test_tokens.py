"""Tokens of an OpenID provider and of a cluster: good, old, of others, forged; and revocation."""

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from certificates import Authority, Identity
from prometheus_client import CollectorRegistry

from foretoken.app.config import OidcConfig, ServerConfig, TokenReviewConfig
from foretoken.app.serve import new_server
from foretoken.app.server_credentials import build_credentials
from foretoken.app.token_review import ReviewedTokens
from foretoken.app.tokens import FileTokens, Tokens
from foretoken.domain.errors import (
    InvalidRequestError,
    ServiceUnavailableError,
    UnauthenticatedError,
)

jwt = pytest.importorskip("jwt", reason="the extra oidc is not installed")
from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: E402

from foretoken.app.oidc import OidcTokens  # noqa: E402

_OWN_TOKEN = "own"  # noqa: S105 - of a test
_LIST_RUNS = "/foretoken.api.catalog.v1.CatalogService/ListRuns"
_PRUNE = "/foretoken.api.catalog.v1.CatalogService/Prune"


class _Site(BaseHTTPRequestHandler):
    """An OpenID provider and an API server, whose answers tests choose."""

    address: ClassVar[str] = ""
    keys: ClassVar[list[Any]] = []
    review: ClassVar[Mapping[str, Any]] = {}
    status: ClassVar[int] = 201
    requests: ClassVar[list[str]] = []
    reviewed: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        found = {
            "/.well-known/openid-configuration": {
                "issuer": self.address,
                "jwks_uri": f"{self.address}/keys",
            },
            "/keys": {"keys": self.keys},
        }
        self._answer(200, found[self.path])

    def do_POST(self) -> None:
        self.requests.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reviewed.append((self.headers["Authorization"], body["spec"]))
        self._answer(self.status, {"status": self.review})

    def _answer(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def address(authority: Authority) -> Iterator[str]:
    identity = authority.issue("site")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.certificate, identity.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _Site.address = f"https://localhost:{server.server_address[1]}"
        yield _Site.address
        server.shutdown()


@pytest.fixture(scope="module")
def key() -> Any:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _public(key: Any, key_id: str) -> Any:
    return {
        **json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())),
        "kid": key_id, "use": "sig",
    }  # fmt: skip


@pytest.fixture
def issue(address: str, key: Any) -> Any:
    """Return what makes tokens of the provider, good but for the claims that are given, or None."""
    _Site.keys[:] = [_public(key, "first")]
    _Site.requests.clear()

    def issue(key_id: str = "first", with_key: Any = None, **claims: Any) -> str:
        content: dict[str, Any] = {
            "iss": address,
            "aud": "foretoken",
            "sub": "ada",
            "exp": int(time.time()) + 600,
            **claims,
        }
        content = {name: value for name, value in content.items() if value is not None}
        return str(jwt.encode(content, with_key or key, algorithm="RS256", headers={"kid": key_id}))

    return issue


@pytest.fixture
def oidc(address: str, authority: Authority) -> OidcConfig:
    return OidcConfig(issuer=address, audience="foretoken", ca_file=str(authority.certificate))


def test_a_good_token_has_the_name_of_its_claim(oidc: OidcConfig, issue: Any) -> None:
    verdict = OidcTokens(oidc).check(issue())
    assert verdict is not None
    assert "oidc:ada" == verdict.name
    # Its keys are fetched once.
    source = OidcTokens(oidc)
    for number in range(3):
        source.check(issue(sub=f"user-{number}"))
    assert 4 == len(_Site.requests)


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": 1_000_000_000}, "expired"),
        ({"aud": "another-service"}, "[Aa]udience"),
        ({"aud": None}, "[Aa]udience|aud"),
        ({"exp": None}, "exp"),
        ({"sub": None}, "sub"),
        ({"nbf": 9_000_000_000}, "not yet valid"),
    ],
)
def test_a_token_that_is_not_good_says_why(
    oidc: OidcConfig, issue: Any, claims: Mapping[str, Any], why: str
) -> None:
    with pytest.raises(UnauthenticatedError, match=why):
        OidcTokens(oidc).check(issue(**claims))


def test_a_forged_token_is_refused(oidc: OidcConfig, issue: Any, key: Any) -> None:
    """Of another key under the same name, of a key that is made up, and of none."""
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    source = OidcTokens(oidc)
    with pytest.raises(UnauthenticatedError, match="Signature"):
        source.check(issue(with_key=other))
    with pytest.raises(UnauthenticatedError, match="none of its issuer's"):
        source.check(issue("made-up", with_key=other))
    body = jwt.decode(issue(), options={"verify_signature": False})
    unsigned = jwt.encode(body, None, algorithm="none", headers={"kid": "first"})
    with pytest.raises(UnauthenticatedError, match="alg"):
        source.check(unsigned)
    # A public key that is taken for a secret both know.
    public = key.public_key().public_numbers().n.to_bytes(256, "big")
    shared = jwt.encode(body, public, algorithm="HS256", headers={"kid": "first"})
    with pytest.raises(UnauthenticatedError, match="alg"):
        source.check(shared)


def test_made_up_keys_do_not_have_the_provider_asked_each_time(
    oidc: OidcConfig, issue: Any
) -> None:
    source = OidcTokens(oidc)
    for number in range(5):
        with pytest.raises(UnauthenticatedError):
            source.check(issue(f"made-up-{number}"))
    assert 2 == len(_Site.requests)


def test_tokens_of_others_are_for_others_to_check(oidc: OidcConfig, issue: Any) -> None:
    source = OidcTokens(oidc)
    assert source.check(issue(iss="https://another.example.com")) is None
    assert source.check("open-sesame") is None
    assert [] == _Site.requests


def test_a_provider_that_is_away_is_no_refusal(oidc: OidcConfig, issue: Any) -> None:
    token = issue(iss="https://localhost:1")
    away = OidcConfig(issuer="https://localhost:1", audience="foretoken")
    with pytest.raises(ServiceUnavailableError, match="cannot be fetched"):
        OidcTokens(away).check(token)
    del oidc


@pytest.fixture
def review(address: str, authority: Authority, tmp_path: Path) -> TokenReviewConfig:
    (tmp_path / "own").write_text(_OWN_TOKEN)
    _Site.status = 201
    _Site.reviewed.clear()
    _Site.review = {
        "authenticated": True,
        "user": {"username": "system:serviceaccount:research:notebook"},
        "audiences": ["foretoken"],
    }
    return TokenReviewConfig(
        audiences=("foretoken",),
        api_server=address,
        token_file=str(tmp_path / "own"),
        ca_file=str(authority.certificate),
    )


def test_a_cluster_says_whose_a_token_is(review: TokenReviewConfig) -> None:
    verdict = ReviewedTokens(review).check("projected")
    assert verdict is not None
    assert "system:serviceaccount:research:notebook" == verdict.name
    spec = {"token": "projected", "audiences": ["foretoken"]}
    assert [(f"Bearer {_OWN_TOKEN}", spec)] == _Site.reviewed


@pytest.mark.parametrize(
    "changes", [{"authenticated": False}, {"audiences": ["vault"]}, {"audiences": []}, {"user": {}}]
)
def test_a_cluster_s_token_for_others_is_nobody_s(
    review: TokenReviewConfig, changes: Mapping[str, Any]
) -> None:
    _Site.review = {**_Site.review, **changes}
    assert ReviewedTokens(review).check("projected") is None


def test_a_cluster_that_does_not_review_is_no_refusal(review: TokenReviewConfig) -> None:
    _Site.status = 403
    with pytest.raises(ServiceUnavailableError, match="system:auth-delegator"):
        ReviewedTokens(review).check("projected")


def test_answers_are_remembered_for_a_while(review: TokenReviewConfig) -> None:
    """A token that was revoked is refused within a minute."""
    now = [1000.0]
    tokens = Tokens(None, (ReviewedTokens(review),), lambda: now[0])
    shown = {"authorization": "Bearer projected"}
    for _ in range(3):
        assert "system:serviceaccount:research:notebook" == tokens.find(shown)
    assert 1 == len(_Site.reviewed)
    _Site.review = {"authenticated": False}
    now[0] += 61.0
    for _ in range(3):
        assert tokens.find(shown) is None
    assert 2 == len(_Site.reviewed)


def _ask(channel: grpc.Channel, method: str, token: str = "") -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        list(channel.stream_stream(method)(iter((b"",)), timeout=60.0, metadata=metadata))
    except grpc.RpcError as err:
        return str(err.code().name)
    return "OK"


def _answer(_requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b""


class _EveryMethod(grpc.GenericRpcHandler):
    def service(self, _details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(_answer)


def _serve(stack: ExitStack, config: ServerConfig) -> int:
    server = new_server(config, CollectorRegistry(), stack)
    server.add_generic_rpc_handlers((_EveryMethod(),))
    if config.tls_key_file:
        port = server.add_secure_port("127.0.0.1:0", build_credentials(config))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(lambda: server.stop(None).wait())
    return int(port)


def test_a_server_takes_tokens_of_every_source(
    tmp_path: Path, oidc: OidcConfig, review: TokenReviewConfig, issue: Any
) -> None:
    (tmp_path / "tokens").write_text("night-job first\n")
    config = ServerConfig(
        token_file=str(tmp_path / "tokens"),
        oidc=oidc,
        token_review=review,
        callers={
            "night-job": ("admin",),
            "oidc:ada": ("reader",),
            "system:serviceaccount:research:notebook": ("reader",),
        },
    )
    with ExitStack() as stack:
        port = _serve(stack, config)
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        for token in ("first", issue(), "projected"):
            assert "OK" == _ask(channel, _LIST_RUNS, token)
        assert "OK" == _ask(channel, _PRUNE, "first")
        for token in (issue(), "projected", issue(sub="eve")):
            assert "PERMISSION_DENIED" == _ask(channel, _PRUNE, token)
        _Site.review = {"authenticated": False}
        for token in ("", "guess", issue(exp=1_000_000_000), issue(aud="vault")):
            assert "UNAUTHENTICATED" == _ask(channel, _LIST_RUNS, token)
        _Site.status = 500
        assert "UNAVAILABLE" == _ask(channel, _LIST_RUNS, "another guess")


def _fingerprint(identity: Identity) -> str:
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in"]
    shown = subprocess.run(
        [*command, str(identity.certificate)], check=True, capture_output=True, text=True
    )
    return shown.stdout


@pytest.mark.slow
def test_a_revoked_certificate_is_refused_over_its_connection(
    tmp_path: Path, authority: Authority
) -> None:
    served, ada, bob = (authority.issue(name) for name in ("revoking", "ada", "bob"))
    revoked = tmp_path / "revoked"
    revoked.write_text("# none yet\n")
    config = ServerConfig(
        tls_certificate_file=str(served.certificate),
        tls_key_file=str(served.key),
        tls_client_ca_file=str(authority.certificate),
        revoked_file=str(revoked),
    )
    with ExitStack() as stack:
        port = _serve(stack, config)
        channels = [
            stack.enter_context(
                grpc.secure_channel(
                    f"localhost:{port}",
                    grpc.ssl_channel_credentials(
                        authority.certificate.read_bytes(),
                        caller.key.read_bytes(),
                        caller.certificate.read_bytes(),
                    ),
                )
            )
            for caller in (ada, bob)
        ]
        assert ["OK", "OK"] == [_ask(channel, _LIST_RUNS) for channel in channels]
        revoked.write_text(f"{_fingerprint(ada)}# left the team\n")
        time.sleep(1.1)
        assert ["UNAUTHENTICATED", "OK"] == [_ask(channel, _LIST_RUNS) for channel in channels]
        # What is no fingerprint leaves what is known.
        revoked.write_text("ada\n")
        time.sleep(1.1)
        assert ["UNAUTHENTICATED", "OK"] == [_ask(channel, _LIST_RUNS) for channel in channels]


def test_what_would_let_in_others_stops_the_start(tmp_path: Path) -> None:
    provider = {"issuer": "https://login.example.com", "audience": "foretoken"}
    with pytest.raises(InvalidRequestError, match=r"callers"):
        ServerConfig(oidc=OidcConfig(**provider))
    for change in ({"issuer": "http://login.example.com"}, {"audience": ""}):
        with pytest.raises(InvalidRequestError, match=next(iter(change))):
            OidcConfig(**{**provider, **change})
    with pytest.raises(InvalidRequestError, match="revoked_file"):
        ServerConfig(revoked_file="revoked")
    with pytest.raises(InvalidRequestError, match="is not https"):
        ReviewedTokens(TokenReviewConfig(api_server="http://localhost"))
    (tmp_path / "tokens").write_text("a token of three words\n")
    with pytest.raises(InvalidRequestError, match="line 1"):
        FileTokens(str(tmp_path / "tokens"))
