"""From any overlay to any other, and from a version to the next, is an apply that works."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from kubernetes_manifests import Manifest, render

_VARIANTS = (
    "base",
    "overlays/dev",
    "overlays/gpu-profiler",
    "overlays/lake",
    "overlays/production",
    "overlays/profiler-controller",
)
# What may change of a StatefulSet. Source: the API server's own message, "updates to statefulset
# spec for fields other than ... are forbidden" (ValidateStatefulSetUpdate of Kubernetes 1.36).
_CHANGEABLE = {
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
}


def _fixed(manifest: Manifest) -> Mapping[str, object]:
    """Return what an apply can not change of an object that is there."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "StatefulSet":
        return {key: value for key, value in spec.items() if key not in _CHANGEABLE}
    if kind == "Deployment":
        return {"selector": spec["selector"]}
    if kind == "Service":
        # None stands for no address of its own, for ever.
        return {"clusterIP": spec.get("clusterIP", "")}
    if kind == "PersistentVolumeClaim":
        return {key: value for key, value in spec.items() if key != "resources"}
    if kind.endswith("RoleBinding"):
        return {"roleRef": manifest["roleRef"]}
    return {}


@pytest.fixture(scope="module")
def variants(repository: Path, find_tool: Callable[[str], str]) -> dict[str, list[Manifest]]:
    folder = repository / "deploy" / "k8s"
    return {name: render(find_tool("kubectl"), folder / name) for name in _VARIANTS}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(_VARIANTS, 2)])
def test_every_move_leaves_alone_what_cannot_change(
    variants: dict[str, list[Manifest]], before: str, after: str
) -> None:
    there = {(m["kind"], m["metadata"]["name"]): _fixed(m) for m in variants[before]}
    comes = {(m["kind"], m["metadata"]["name"]): _fixed(m) for m in variants[after]}
    both = there.keys() & comes.keys()
    assert ("StatefulSet", "catalog") in both
    assert {key: there[key] for key in both} == {key: comes[key] for key in both}


@pytest.mark.parametrize("variant", _VARIANTS)
def test_nothing_has_an_image_and_cannot_change(
    variants: dict[str, list[Manifest]], variant: str
) -> None:
    """A Job's pods are those it was made with: an upgrade of its image would be refused."""
    assert {"Job", "Pod"} & {m["kind"] for m in variants[variant]} == set()
