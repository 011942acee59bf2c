"""What each extra installs is enough for what it is for."""

import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

# Distributions whose import name differs.
_MODULES = {
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "prometheus-client": "prometheus_client",
}
_SERVICES = ("catalog", "predictor", "profiler", "simulator")


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_starts_with_its_own_extra_alone(
    pyproject: Mapping[str, Any], service: str
) -> None:
    """Its image has nothing else: the command line and the service must load without the rest."""
    extras = pyproject["project"]["optional-dependencies"]
    others = [extra for extra in _SERVICES if extra != service]
    absent = {name for extra in others for name in _modules(extras[extra])}
    _import_without(
        sorted(absent),
        [
            "foretoken.app.cli.main",
            "foretoken.app.serve",
            f"foretoken.{service}.service",
            f"foretoken.{service}.servicer",
        ],
    )


def test_the_client_needs_no_extra(pyproject: Mapping[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    absent = {name for extra in (*_SERVICES, "app") for name in _modules(extras[extra])}
    assert {"duckdb", "lightgbm", "torch", "jinja2", "typer", "grpc_health"} <= absent
    _import_without(
        sorted(absent),
        ["foretoken.client.facade", "foretoken.domain.lowering", "foretoken.wire.codec"],
    )


def _modules(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in requirements}
    return {_MODULES.get(name, name) for name in names - {"foretoken"}}


def _import_without(absent: list[str], modules: list[str]) -> None:
    program = "\n".join(
        [
            "import importlib, sys",
            # None makes Python say that there is no such module.
            f"sys.modules.update(dict.fromkeys({absent!r}))",
            *(f"importlib.import_module({module!r})" for module in modules),
        ]
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
