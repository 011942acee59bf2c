"""What the architecture tests look at: the repository's own files."""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return _ROOT


@pytest.fixture(scope="session")
def pyproject() -> Mapping[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def source_roots(pyproject: Mapping[str, Any]) -> list[Path]:
    """The folders whose `foretoken` parts make up the namespace package."""
    return [_ROOT / root for root in pyproject["tool"]["hatch"]["build"]["dev-mode-dirs"]]


@pytest.fixture(scope="session")
def python_files() -> list[Path]:
    """Every Python file people write: sources and tests, not the generated stubs."""
    folders = ("clients/python/src", "services", "tests")
    return sorted(path for folder in folders for path in (_ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="session")
def find_tool() -> Callable[[str], str]:
    """Return the path of a program; without it the test skips, in CI it fails."""

    def find(name: str) -> str:
        beside_python = shutil.which(name, path=str(_ROOT / ".venv" / "bin"))
        found = beside_python or shutil.which(name)
        if found is None and os.environ.get("CI"):
            pytest.fail(f"{name} is not on this machine, and CI must not skip what it checks")
        if found is None:
            pytest.skip(f"{name} is not on this machine")
        return found

    return find


@pytest.fixture(scope="session")
def repository_files(find_tool: Callable[[str], str]) -> list[Path]:
    """Every file that is in git or is about to be: tracked, or new and not ignored."""
    command = [find_tool("git"), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    paths = [_ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]
