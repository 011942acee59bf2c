"""From any overlay to any other, and from a version to the next, is an apply that works."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from kubernetes_manifests import VARIANTS, Manifest, fixed_of, render

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def variants(repository: Path, find_tool: Callable[[str], str]) -> dict[str, list[Manifest]]:
    folder = repository / "deploy" / "k8s"
    return {name: render(find_tool("kubectl"), folder / name) for name in VARIANTS}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(VARIANTS, 2)])
def test_every_move_leaves_alone_what_cannot_change(
    variants: dict[str, list[Manifest]], before: str, after: str
) -> None:
    there = {(m["kind"], m["metadata"]["name"]): fixed_of(m) for m in variants[before]}
    comes = {(m["kind"], m["metadata"]["name"]): fixed_of(m) for m in variants[after]}
    both = there.keys() & comes.keys()
    assert ("StatefulSet", "catalog") in both
    assert {key: there[key] for key in both} == {key: comes[key] for key in both}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_has_an_image_and_cannot_change(
    variants: dict[str, list[Manifest]], variant: str
) -> None:
    """A Job's pods are those it was made with: an upgrade of its image would be refused."""
    assert {"Job", "Pod"} & {m["kind"] for m in variants[variant]} == set()
