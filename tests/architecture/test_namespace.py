"""All source roots make up the package `foretoken`, from a checkout and from a wheel."""

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import foretoken


def test_one_root_has_the_front_which_knows_the_others(source_roots: list[Path]) -> None:
    """A second `foretoken/__init__.py` would hide the first."""
    fronts = [root for root in source_roots if (root / "foretoken" / "__init__.py").exists()]
    assert ["clients/python/src"] == ["/".join(root.parts[-3:]) for root in fronts]
    assert {str(root / "foretoken") for root in source_roots} == set(foretoken.__path__)


def test_every_tool_knows_the_same_roots(pyproject: Mapping[str, Any]) -> None:
    tool = pyproject["tool"]
    roots = tool["hatch"]["build"]["dev-mode-dirs"]
    packages = tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [f"{root}/foretoken" for root in roots] == packages
    assert roots == tool["mypy"]["mypy_path"]
    assert [root for root in roots if root != "clients/python/gen"] == tool["ruff"]["src"]


def test_every_package_is_found_in_its_own_root(source_roots: list[Path]) -> None:
    """The environment the tests run in has an editable install that sees every root."""
    packages = [
        package
        for root in source_roots
        for package in (root / "foretoken").iterdir()
        if package.is_dir() and package.name != "__pycache__"
    ]
    found = {package: find_spec(f"foretoken.{package.name}") for package in packages}
    locations = {
        package: list(spec.submodule_search_locations or ()) if spec else []
        for package, spec in found.items()
    }
    assert {package: [str(package)] for package in packages} == locations


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a release would build it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_source_and_data_file(
    wheel: Path, source_roots: list[Path], repository_files: list[Path]
) -> None:
    expected = {
        path.relative_to(root).as_posix()
        for root in source_roots
        for path in repository_files
        if path.is_relative_to(root / "foretoken")
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("foretoken/")}
    assert (set(), set()) == (expected - packed, packed - expected)
    assert any(name.endswith(".yaml") for name in packed)


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Data files are read from where the wheel was unpacked, not from the editable roots."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import foretoken.domain.hardware.device as d, foretoken.domain.models.architecture as m;"
        "print(d.__file__, len(d.all_devices()) > 0, len(m.all_models()) > 0)"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = tmp_path / "foretoken" / "domain" / "hardware" / "device.py"
    assert f"{expected} True True" == answer.stdout.strip()
