"""What each extra installs is enough for what it is for."""

import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from command_modules import IMPORT_COMMANDS
from imported_packages import third_party_packages

pytestmark = pytest.mark.slow

# Distributions whose import name differs.
_MODULES = {
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "nvidia-ml-py": "pynvml",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "prometheus-client": "prometheus_client",
}
# The extras that a service's features need on top of a plain installation.
_EXTRAS = {
    "app": ("oidc", "tracing"),
    "catalog": (),
    "predictor": (),
    "profiler": ("profiler", "graphs", "kubernetes"),
    "simulator": ("search",),
}


@pytest.mark.parametrize("service", ["catalog", "predictor", "simulator", "profiler"])
def test_a_service_starts_without_what_only_others_need(
    pyproject: Mapping[str, Any], service: str
) -> None:
    """A plain installation runs all but the profiler, whose image has no more than its extras."""
    extras = pyproject["project"]["optional-dependencies"]
    absent = {name for extra in extras.values() for name in _modules(extra)}
    absent -= _modules(pyproject["project"]["dependencies"])
    if service == "profiler":
        absent -= _modules(extras["profiler"])
    assert {"ray", "kubernetes", "transformers"} <= absent
    _import_without(
        sorted(absent),
        [
            "foretoken.app.cli.main",
            "foretoken.app.serve",
            f"foretoken.{service}.service",
            f"foretoken.{service}.servicer",
        ],
        IMPORT_COMMANDS,
    )


@pytest.mark.parametrize("service", _EXTRAS)
def test_every_import_of_a_service_is_declared(
    repository: Path, pyproject: Mapping[str, Any], service: str
) -> None:
    """What only comes along with another dependency may be gone with its next release."""
    project = pyproject["project"]
    requirements = [*project["dependencies"]]
    for extra in _EXTRAS[service]:
        requirements += project["optional-dependencies"][extra]
    declared = {_distribution(requirement) for requirement in requirements}
    providers = packages_distributions()
    undeclared = {
        f"{path.relative_to(repository)}: {name}"
        for path in (repository / "services" / service / "src").rglob("*.py")
        for name in third_party_packages(path)
        if not declared & {_distribution(provider) for provider in providers.get(name, [])}
    }
    assert undeclared == set()


def test_what_only_calls_services_loads_nothing_of_theirs(pyproject: Mapping[str, Any]) -> None:
    """A client starts at once, and runs where databases and compilers are left out."""
    project = pyproject["project"]
    needed = {"googleapis", "grpc", "grpcio", "numpy", "protobuf", "pyarrow", "pyyaml"}
    everything = [project["dependencies"], *project["optional-dependencies"].values()]
    absent = {name for part in everything for name in _modules(part)} - needed
    absent = {name for name in absent if not name.startswith(("grpcio", "googleapis"))}
    assert {"duckdb", "lightgbm", "torch", "jinja2", "typer", "grpc_health", "numba"} <= absent
    _import_without(
        sorted(absent),
        ["foretoken.client.facade", "foretoken.domain.lowering.lower", "foretoken.wire.codec"],
        "import foretoken; foretoken.connect('localhost:1').close()",
    )


def _modules(requirements: list[str]) -> set[str]:
    names = {_distribution(requirement) for requirement in requirements}
    return {_MODULES.get(name, name) for name in names - {"foretoken"}}


def _distribution(requirement: str) -> str:
    return re.split(r"[^a-z0-9-]", requirement.lower().replace("_", "-"))[0]


def _import_without(absent: list[str], modules: list[str], further: str = "") -> None:
    program = "\n".join(
        [
            "import importlib, sys",
            # None makes Python say that there is no such module.
            f"sys.modules.update(dict.fromkeys({absent!r}))",
            *(f"importlib.import_module({module!r})" for module in modules),
            further,
        ]
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
