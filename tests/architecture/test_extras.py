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

# Distributions whose import name differs.
_MODULES = {
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
}
_SERVICES = ("catalog", "predictor", "profiler", "simulator")
# What some of a service's features need beside what the service does.
_FURTHER_EXTRAS = {"profiler": ("graphs", "kubernetes"), "simulator": ("search",)}


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_starts_with_its_own_extra_alone(
    pyproject: Mapping[str, Any], service: str
) -> None:
    """Its image has nothing else: the command line and the service must load without the rest."""
    extras = pyproject["project"]["optional-dependencies"]
    others = [extra for extra in (*_SERVICES, "graphs", "kubernetes") if extra != service]
    absent = {name for extra in others for name in _modules(extras[extra])}
    absent -= _modules(extras[service])
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


@pytest.mark.parametrize("folder", ["services/app", *(f"services/{s}" for s in _SERVICES)])
def test_every_import_of_a_service_is_declared(
    repository: Path, pyproject: Mapping[str, Any], folder: str
) -> None:
    """What only comes along with another dependency may be gone with its next release."""
    extras = pyproject["project"]["optional-dependencies"]
    service = Path(folder).name
    requirements = [*pyproject["project"]["dependencies"], *extras["app"]]
    for extra in (service, *_FURTHER_EXTRAS.get(service, ())):
        requirements += extras.get(extra, ())
    declared = {_distribution(requirement) for requirement in requirements}
    providers = packages_distributions()
    undeclared = {
        f"{path.relative_to(repository)}: {name}"
        for path in (repository / folder / "src").rglob("*.py")
        for name in third_party_packages(path)
        if not declared & {_distribution(provider) for provider in providers.get(name, [])}
    }
    assert undeclared == set()


def test_the_client_needs_no_extra(pyproject: Mapping[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    everything = (*_SERVICES, "app", "graphs", "kubernetes")
    absent = {name for extra in everything for name in _modules(extras[extra])}
    assert {"duckdb", "lightgbm", "torch", "jinja2", "typer", "grpc_health"} <= absent
    _import_without(
        sorted(absent),
        ["foretoken.client.facade", "foretoken.domain.lowering", "foretoken.wire.codec"],
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
