"""The program's configuration: flag over environment over file over default.

The file is YAML. An environment variable overrides one key: `FORETOKEN_ENDPOINTS__CATALOG` is
`endpoints.catalog`, its value read as YAML. `FORETOKEN_CONFIG` names the file, `FORETOKEN_HOME` the
folder of files. An empty variable is one that is not set. Other variables of that prefix are not
ours: Kubernetes makes `FORETOKEN_CATALOG_PORT` of a Service.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.client.channel_options import ChannelOptions
from foretoken.domain import schema
from foretoken.domain.errors import Checks, InvalidRequestError, one_of
from foretoken.domain.plugins import parse_yaml_value, read_yaml

EMBEDDED = "embedded"
SERVICES = ("catalog", "predictor", "simulator", "profiler")

_LOG_FORMATS = ("text", "json")
_LOGGED_CALLS = ("off", "failed", "all")
_MAX_PORT = 65_535

_PREFIX = "FORETOKEN_"
_CONFIG_VARIABLE = "FORETOKEN_CONFIG"
_HOME_VARIABLE = "FORETOKEN_HOME"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointsConfig:
    """Where each service is: `embedded` in this process, or a gRPC address."""

    catalog: str = EMBEDDED
    predictor: str = EMBEDDED
    simulator: str = EMBEDDED
    profiler: str = EMBEDDED


@dataclass(frozen=True, kw_only=True, slots=True)
class OidcConfig:
    """An OpenID provider whose tokens are accepted.

    A token must be signed by a key of the `issuer`, be for the `audience` and not be too old. Its
    name is `prefix` and what `name_claim` says. The keys are at `jwks_uri` (empty: where the issuer
    says that they are); `ca_file` vouches for both (empty: the system's authorities).
    """

    issuer: str
    audience: str
    name_claim: str = "sub"
    prefix: str = "oidc:"
    jwks_uri: str = ""
    ca_file: str = ""

    def __post_init__(self) -> None:
        """Check what would accept the tokens of others, or what others could answer for."""
        for name in ("issuer", "jwks_uri"):
            uri = getattr(self, name)
            if uri or name == "issuer":
                is_safe = uri.startswith("https://")
                InvalidRequestError.check("server.oidc", {name: (is_safe, "is an https:// URL")})
        InvalidRequestError.check(
            "server.oidc", {"audience": (bool(self.audience), "is the name of this service there")}
        )


_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenReviewConfig:
    """A Kubernetes cluster whose tokens are accepted, as far as its API server does.

    Tokens must be for one of the `audiences` (empty: for the API server itself). `token_file` and
    `ca_file` are those of the pod's own service account, which needs `system:auth-delegator`.
    """

    audiences: tuple[str, ...] = ()
    api_server: str = "https://kubernetes.default.svc"
    token_file: str = f"{_ACCOUNT_FOLDER}/token"
    ca_file: str = f"{_ACCOUNT_FOLDER}/ca.crt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How this process serves. Port 0 takes a free one; `metrics_port` -1 serves no metrics.

    `health_port` (-1: none) answers for the health alone, in the clear and to anybody, as probes of
    a kubelet need it, which speak no TLS; the port of the calls answers for it too.

    On SIGTERM health turns NOT_SERVING, `drain_s` pass, then running calls get `grace_s`.
    TLS is on when certificate and key files are given; with `tls_client_ca_file` clients must
    show a certificate. With `token_file` calls must carry a token of that file, except those for
    health; a line of it is a token, or a name and a token. `callers` are roles and rights by the
    SPIFFE id or common name of a certificate, the name of a token, `anonymous`, or `*` for who has
    a name that is not there. Without any, who has a name may do everything, who has none may read,
    and on a loopback address do everything.

    Tokens may also be those of an OpenID provider (`oidc`) or a Kubernetes cluster
    (`token_review`), whose names have the rights that `callers` gives them, and no others.
    `revoked_file` lists certificates that are not accepted any more, a SHA-256 fingerprint a line.
    Metrics are served on `metrics_host`, to anybody who reaches it.

    `http_port` (-1: none) serves the same calls as JSON, and the pages, with the same TLS, tokens
    and callers. `http_hosts` are names by which browsers may reach it (none: any; on a loopback
    address those of this machine). Bodies of requests have at most `http_max_bytes`.

    Of each method `max_workers` calls run at once, or what `budgets` says of it (`Record: 64`), and
    `max_queued_calls` wait; of methods that hold their thread for minutes, which are `Record`,
    uploads and watches, none wait. Calls of the predictor about `large_call_rows` and more (0: any
    number) run on as many threads as there are cores, and at most half of the method's. What is
    refused may be asked again `retry_after_s` later. A call
    whose first message takes longer than `first_message_s`, and a stream over which nothing comes
    for `stream_idle_s`, are ended. A connection older than `max_connection_age_s` (0: any) takes no
    more calls, and those that run get `connection_grace_s`.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9090
    metrics_host: str = "127.0.0.1"
    health_port: int = -1
    http_port: int = -1
    http_hosts: tuple[str, ...] = ()
    http_max_bytes: int = 32 * 2**20
    max_workers: int = 16
    max_queued_calls: int = 64
    budgets: Mapping[str, int] = field(default_factory=dict)
    large_call_rows: int = 1_000
    retry_after_s: float = 1.0
    first_message_s: float = 10.0
    stream_idle_s: float = 300.0
    max_connection_age_s: float = 0.0
    connection_grace_s: float = 660.0
    drain_s: float = 0.0
    grace_s: float = 10.0
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_client_ca_file: str = ""
    token_file: str = ""
    oidc: OidcConfig | None = None
    token_review: TokenReviewConfig | None = None
    revoked_file: str = ""
    callers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the ports, the limits, and that TLS is whole or off: half would be in the clear."""
        InvalidRequestError.check("server", self._limits())
        optional = ("metrics_port", "health_port", "http_port")
        for name, lowest in (("port", 0), *((name, -1) for name in optional)):
            if not lowest <= getattr(self, name) <= _MAX_PORT:
                raise InvalidRequestError.of_field(name, f"is from {lowest} to {_MAX_PORT}")
        if bool(self.tls_certificate_file) != bool(self.tls_key_file):
            missing = "tls_key_file" if self.tls_certificate_file else "tls_certificate_file"
            raise InvalidRequestError.of_field(missing, "TLS needs a certificate and its key")
        if self.revoked_file and not self.tls_client_ca_file:
            raise InvalidRequestError.of_field(
                "revoked_file", "certificates of clients are checked with tls_client_ca_file only"
            )
        if (self.oidc or self.token_review) and not self.callers:
            raise InvalidRequestError.of_field(
                "callers",
                "says which of the provider's names have which roles; without it all may"
                " do everything",
            )
        if self.tls_client_ca_file and not self.tls_certificate_file:
            raise InvalidRequestError.of_field(
                "tls_client_ca_file", "clients show certificates over TLS only; set the server's"
            )

    def _limits(self) -> Checks:
        least = {
            "max_workers": 1,
            "max_queued_calls": 0,
            "large_call_rows": 0,
            "max_connection_age_s": 0,
            "http_max_bytes": 1,
        }
        checks = {
            name: (getattr(self, name) >= low, f"is at least {low}") for name, low in least.items()
        }
        for name in ("retry_after_s", "first_message_s", "stream_idle_s", "connection_grace_s"):
            checks[name] = (getattr(self, name) > 0, "is more than 0")
        for method, budget in self.budgets.items():
            checks[f"budgets.{method}"] = (budget >= 1, "is at least 1")
        return checks


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """`format` is `text` or `json`; `level` a standard level name.

    Of the calls of a server those that `failed` have a line, none of them (`off`), or `all`.
    """

    level: str = "INFO"
    format: str = "text"
    calls: str = "failed"

    def __post_init__(self) -> None:
        """Check the names."""
        levels = sorted(logging.getLevelNamesMapping())
        if self.level.upper() not in levels:
            raise InvalidRequestError.of_field("level", f"is one of {', '.join(levels)}")
        InvalidRequestError.check("", one_of(self, format=_LOG_FORMATS, calls=_LOGGED_CALLS))


@dataclass(frozen=True, kw_only=True, slots=True)
class TracingConfig:
    """Spans are sent over OTLP/gRPC to `otlp_endpoint`, such as `http://collector:4317`.

    `https` means TLS. Empty: none are recorded. Of all requests `sample_ratio` are, chosen by id.
    """

    otlp_endpoint: str = ""
    sample_ratio: float = 1.0

    def __post_init__(self) -> None:
        """Check that it is an address that can be called, and a share."""
        checks: Checks = {
            "otlp_endpoint": (
                not self.otlp_endpoint or self.otlp_endpoint.startswith(("http://", "https://")),
                "begins with http:// or https://",
            ),
            "sample_ratio": (0 <= self.sample_ratio <= 1, "is from 0 to 1"),
        }
        InvalidRequestError.check("tracing", checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppConfig:
    """Everything that can be configured.

    `home` holds the embedded services' files; empty means `~/.local/share/foretoken`. The
    sections named like a service are handed to it; its own `config.py` says what they hold, and
    paths in them default to places under `home`. `client` holds deadlines, retries and TLS of the
    calls this process makes: see `ChannelOptions`.
    """

    home: str = ""
    endpoints: EndpointsConfig = field(default_factory=EndpointsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    client: Mapping[str, Any] = field(default_factory=dict)
    log: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    catalog: Mapping[str, Any] = field(default_factory=dict)
    predictor: Mapping[str, Any] = field(default_factory=dict)
    simulator: Mapping[str, Any] = field(default_factory=dict)
    profiler: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the section of calls; those of services are checked where one is opened."""
        self.channel_options("")

    def channel_options(self, address: str) -> ChannelOptions:
        """Return how this process reaches a service at an address.

        Raises:
            InvalidRequestError: the section `client` has an unknown key or a wrong value.

        """
        if "address" in self.client:
            raise InvalidRequestError.of_field("client.address", "addresses stand in endpoints")
        return schema.decode(ChannelOptions, {**self.client, "address": address}, "client")

    @property
    def starter(self) -> str:
        """Folder of the starter catalog; empty where there is none."""
        return str(self.predictor.get("starter") or "")

    @property
    def home_path(self) -> Path:
        """Folder of the embedded services' files."""
        if self.home:
            return Path(self.home).expanduser()
        return Path.home() / ".local" / "share" / "foretoken"


def load_config(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Any]
) -> AppConfig:
    """Return the configuration of this process.

    `overrides` are flags by dotted path (`endpoints.catalog`); None values are not set.

    Raises:
        InvalidRequestError: an unknown key or a wrong value, with its path.

    """
    chosen = path or (
        Path(environment[_CONFIG_VARIABLE]) if environment.get(_CONFIG_VARIABLE) else None
    )
    content: dict[str, Any] = {}
    if chosen is not None:
        content = read_yaml(chosen, "config")
    for name, value in environment.items():
        if value and name == _HOME_VARIABLE:
            content["home"] = value
        elif value and name.startswith(_PREFIX) and "__" in name:
            dotted = name.removeprefix(_PREFIX).lower().replace("__", ".")
            schema.set_key(content, dotted, parse_yaml_value(value, name))
    for dotted, value in overrides.items():
        if value is not None:
            schema.set_key(content, dotted, value)
    return schema.decode(AppConfig, content)


def process_environment() -> Mapping[str, str]:
    """Return the environment of this process; the only place that reads it."""
    return os.environ
