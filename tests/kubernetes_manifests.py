"""The manifests as kubectl renders them, and what tests look for in them."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from foretoken.app.config import AppConfig, load_config

Manifest = Mapping[str, Any]
# The oldest with indexes of Jobs that fail for themselves (`backoffLimitPerIndex`, on since 1.29).
# Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/
OLDEST_VERSION = (1, 29)
# What a cluster applies; `overlays/site` holds what a site writes itself.
VARIANTS = (
    "base",
    "overlays/dev",
    "overlays/gpu-profiler",
    "overlays/lake",
    "overlays/production",
    "overlays/profiler-controller",
    "overlays/ray",
    "overlays/web",
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


def render(kubectl: str, folder: Path) -> list[Manifest]:
    """Return everything that one variant applies."""
    rendered = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert (0, "") == (rendered.returncode, rendered.stderr)
    return list(yaml.safe_load_all(rendered.stdout))


def fixed_of(manifest: Manifest) -> Mapping[str, object]:
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


def find(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Return one object; the hash behind a generated name may be left out."""
    names = re.compile(rf"{name}(-[a-z0-9]{{10}})?")
    (found,) = (
        m for m in manifests if m["kind"] == kind and names.fullmatch(m["metadata"]["name"])
    )
    return found


def templates(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the pod templates by the name of what makes pods of them."""
    for manifest in manifests:
        given = manifest.get("spec", {})
        for spec in (given, given.get("jobTemplate", {}).get("spec", {})):
            if "template" in spec:
                yield manifest["metadata"]["name"], spec["template"]


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the specifications of pods by the name of what makes them."""
    return {name: template["spec"] for name, template in templates(manifests)}


def environment(pod: Manifest) -> dict[str, str]:
    """Return the variables of a pod's container that have a value of their own."""
    (container,) = pod["containers"]
    return {e["name"]: e["value"] for e in container.get("env", ()) if "value" in e}


def configs(manifests: Sequence[Manifest]) -> dict[str, AppConfig]:
    """Load every pod's configuration as its program would, with its variables."""
    by_name = pods(manifests)
    found: dict[str, AppConfig] = {}
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap" and "foretoken.yaml" in manifest["data"]:
            service = str(manifest["metadata"]["name"]).rpartition("-config")[0]
            variables = environment(by_name[service])
            del variables["FORETOKEN_CONFIG"]
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "foretoken.yaml")
                path.write_text(manifest["data"]["foretoken.yaml"], encoding="utf-8")
                found[service] = load_config(path, variables, {})
    return found
