"""All source roots make up the package `foretoken`, in a checkout."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
