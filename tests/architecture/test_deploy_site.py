"""One file of values decides what differs from site to site."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_apply import ApplyServer
from kubernetes_manifests import Manifest, find, pods, render

pytestmark = pytest.mark.slow

# Kinds of operators that a cluster may have; their schemas are not part of Kubernetes.
_CUSTOM_KINDS = {"Certificate", "Issuer", "PodMonitor", "PrometheusRule"}

Render = Callable[[Mapping[str, Any]], list[Manifest]]


@pytest.fixture
def render_with(repository: Path, find_tool: Callable[[str], str], tmp_path: Path) -> Render:
    """Renders a copy of the overlay with values of one's own."""
    folder = tmp_path / "k8s"
    shutil.copytree(repository / "deploy" / "k8s", folder)
    site = folder / "overlays" / "mine"
    shutil.copytree(folder / "overlays" / "site", site)

    def render_it(changes: Mapping[str, Any]) -> list[Manifest]:
        values = yaml.safe_load((site / "values.yaml").read_text("utf-8"))
        for name, value in changes.items():
            section, _, key = name.rpartition(".")
            (values["spec"][section] if section else values["spec"])[key] = value
        (site / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        return render(find_tool("kubectl"), site)

    return render_it


def test_every_value_is_taken(render_with: Render) -> None:
    manifests = render_with(
        {
            "registry": "registry.test:5000/one",
            "catalog.storageClass": "fast",
            "catalog.storage": "7Gi",
            "backup.storageClass": "slow",
            "backup.storage": "8Gi",
            "backup.schedule": "1 1 * * *",
            "predictor.minReplicas": 3,
            "predictor.maxReplicas": 4,
            "simulator.minReplicas": 5,
            "simulator.maxReplicas": 6,
        }
    )
    images = {c["image"] for pod in pods(manifests).values() for c in pod["containers"]}
    assert 3 == len(images)
    assert all(image.startswith("registry.test:5000/one/foretoken-") for image in images)
    (claim,) = find(manifests, "StatefulSet", "catalog")["spec"]["volumeClaimTemplates"]
    (backup,) = (m for m in manifests if m["kind"] == "PersistentVolumeClaim")
    assert [("fast", "7Gi"), ("slow", "8Gi")] == [
        (one["spec"]["storageClassName"], one["spec"]["resources"]["requests"]["storage"])
        for one in (claim, backup)
    ]
    (copying,) = (m for m in manifests if m["kind"] == "CronJob")
    assert "1 1 * * *" == copying["spec"]["schedule"]
    assert [(3, 4), (5, 6)] == [
        (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"])
        for scaler in (
            find(manifests, "HorizontalPodAutoscaler", name) for name in ("predictor", "simulator")
        )
    ]


def test_the_values_are_no_object_and_every_one_has_its_place(
    repository: Path, render_with: Render
) -> None:
    manifests = render_with({})
    assert [] == [m for m in manifests if m["kind"] == "Site"]
    with ApplyServer() as server:
        for number, manifest in enumerate(manifests):
            if manifest["kind"] not in _CUSTOM_KINDS:
                server.apply(f"/{number}", dict(manifest))
        assert [] == server.refusals
    folder = repository / "deploy" / "k8s" / "overlays" / "site"
    spec = yaml.safe_load((folder / "values.yaml").read_text("utf-8"))["spec"]
    paths = {
        f"spec.{name}.{key}" if isinstance(value, dict) else f"spec.{name}"
        for name, value in spec.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    taken = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))["replacements"]
    assert paths == {one["source"]["fieldPath"] for one in taken}


def test_without_a_change_it_is_production(
    repository: Path, find_tool: Callable[[str], str], render_with: Render
) -> None:
    """But for where images and volumes come from."""
    folder = repository / "deploy" / "k8s" / "overlays" / "production"
    there = {(m["kind"], m["metadata"]["name"]) for m in render(find_tool("kubectl"), folder)}
    assert there == {(m["kind"], m["metadata"]["name"]) for m in render_with({})}
