"""The one import rule holds, and the linter that keeps it would notice a breach."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from imported_packages import third_party_packages

pytestmark = pytest.mark.slow

# One breach for every contract of pyproject.toml: (contract id, module to add, its import).
_BREACHES = (
    ("layers", "domain/breach_layers.py", "import foretoken.wire"),
    ("layers", "catalog/breach_sibling.py", "import foretoken.predictor"),
    ("domain-parses-in-one-place", "domain/breach_yaml.py", "import yaml"),
    ("torch-in-profiler", "app/breach_torch.py", "import torch"),
    ("transformers-in-profiler", "app/breach_transformers.py", "import transformers"),
    ("kubernetes-in-cluster", "profiler/breach_kubernetes.py", "import kubernetes"),
    ("cluster-without-torch", "profiler/cluster/breach_torch.py", "import torch"),
    ("duckdb-in-catalog", "predictor/breach_duckdb.py", "import duckdb"),
    ("lightgbm-in-predictor", "simulator/breach_lightgbm.py", "import lightgbm"),
    ("ray-in-its-executor", "simulator/breach_ray.py", "import ray"),
    ("opentelemetry-in-its-recorder", "app/breach_opentelemetry.py", "import opentelemetry"),
    (
        "results-before-pages",
        "simulator/serving/breach_report.py",
        "import foretoken.simulator.report.page",
    ),
    (
        "steps-before-callers",
        "simulator/steps/breach_search.py",
        "import foretoken.simulator.search.training.search",
    ),
    (
        "costs-before-serving",
        "simulator/cost/breach_serving.py",
        "import foretoken.simulator.serving.record",
    ),
    ("grpc-at-the-edge", "profiler/breach_grpc.py", "def f():\n    import grpc"),
    ("grpc-at-the-edge", "simulator/breach_stubs.py", "import foretoken.api"),
)


def test_every_contract_is_kept(repository: Path) -> None:
    linted = _lint(repository, {})
    assert 0 == linted.returncode, linted.stdout


def test_every_contract_can_be_broken(
    repository: Path,
    pyproject: Mapping[str, Any],
    tmp_path: Path,
) -> None:
    """In a copy with one breach per contract the linter names each contract and each breach."""
    contracts = {c["id"]: c["name"] for c in pyproject["tool"]["importlinter"]["contracts"]}
    assert set(contracts) == {contract_id for contract_id, _, _ in _BREACHES}

    shutil.copy(repository / "pyproject.toml", tmp_path)
    roots = _copy_roots(pyproject, repository, tmp_path)
    for _, module, line in _BREACHES:
        (package,) = [r / "foretoken" for r in roots if (r / "foretoken" / module).parent.is_dir()]
        (package / module).write_text(line + "\n", encoding="utf-8")
    linted = _lint(tmp_path, {"PYTHONPATH": ":".join(str(root) for root in roots)})

    printed = " ".join(linted.stdout.split())
    assert 1 == linted.returncode, linted.stdout + linted.stderr
    assert [] == [name for name in contracts.values() if f"{name} BROKEN" not in printed]
    modules = [module.removesuffix(".py").replace("/", ".") for _, module, _ in _BREACHES]
    assert [] == [module for module in modules if f"foretoken.{module} ->" not in printed]


def test_the_domain_needs_the_standard_library_alone(repository: Path) -> None:
    """Except for the YAML of its data files, which one module reads."""
    domain = repository / "clients/python/src/foretoken/domain"
    third_party = {
        (path.relative_to(domain).as_posix(), name)
        for path in domain.rglob("*.py")
        for name in third_party_packages(path)
    }
    assert {("plugins.py", "yaml")} == third_party


def _lint(folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lint_imports.py")), "--no-cache"],
        cwd=folder,
        env={"COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _copy_roots(pyproject: Mapping[str, Any], repository: Path, target: Path) -> list[Path]:
    names = [str(root) for root in pyproject["tool"]["ruff"]["src"]]
    for name in names:
        shutil.copytree(repository / name, target / name)
    return [target / name for name in names]
