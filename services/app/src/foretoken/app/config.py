"""The program's configuration: flag over environment over file over default.

The file is YAML. An environment variable overrides one key: `FORETOKEN_ENDPOINTS__CATALOG` is
`endpoints.catalog`. `FORETOKEN_CONFIG` names the file, `FORETOKEN_HOME` the folder of files. Other
variables of that prefix are not ours: Kubernetes makes `FORETOKEN_CATALOG_PORT` of a Service.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.plugins import parse_yaml

EMBEDDED = "embedded"
SERVICES = ("catalog", "predictor", "simulator", "profiler")

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
class ServerConfig:
    """How this process serves. Port 0 takes a free one; `metrics_port` -1 serves no metrics.

    On SIGTERM health turns NOT_SERVING, `drain_s` pass, then running calls get `grace_s`.
    TLS is on when certificate and key files are given; with `tls_client_ca_file` clients must
    show a certificate.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9090
    max_workers: int = 16
    drain_s: float = 0.0
    grace_s: float = 10.0
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_client_ca_file: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """`format` is `text` or `json`; `level` a standard level name."""

    level: str = "INFO"
    format: str = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class AppConfig:
    """Everything the program can be told.

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
    catalog: Mapping[str, Any] = field(default_factory=dict)
    predictor: Mapping[str, Any] = field(default_factory=dict)
    simulator: Mapping[str, Any] = field(default_factory=dict)
    profiler: Mapping[str, Any] = field(default_factory=dict)

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
        content = _copy(parse_yaml(_read(chosen), str(chosen)))
    for name, value in environment.items():
        if name == _HOME_VARIABLE or (name.startswith(_PREFIX) and "__" in name):
            dotted = name.removeprefix(_PREFIX).lower().replace("__", ".")
            _set(content, dotted, _scalar(value))
    for dotted, value in overrides.items():
        if value is not None:
            _set(content, dotted, value)
    return schema.decode(AppConfig, content)


def process_environment() -> Mapping[str, str]:
    """Return the environment of this process; the only place that reads it."""
    return os.environ


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as err:
        raise InvalidRequestError.of_field("config", f"cannot read {path}: {err}") from err


def _copy(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copy(value) if isinstance(value, Mapping) else value for key, value in content.items()
    }


def _scalar(text: str) -> Any:
    return parse_yaml(f"value: {text}", "environment")["value"]


def _set(content: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        child = content.setdefault(key, {})
        if not isinstance(child, dict):
            violation = FieldViolation(dotted, f"{key} is not a section")
            raise InvalidRequestError(f"{dotted}: {key} is not a section", (violation,))
        content = child
    content[last] = value
