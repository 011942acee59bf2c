"""What an API server checks of the custom objects that manifests here are made of."""

from typing import Any

import kubernetes_validate
from kubernetes_rules import expect

Resource = dict[str, Any]
# Fields and those that must be there. Source: RayCluster of ray.io/v1, KubeRay's
# ray-operator/apis/ray/v1/raycluster_types.go at 026f143324c0b7c3cce38db3003b5d45e236fc2e; later
# versions have more, and these still.
_CLUSTER = {
    "headGroupSpec",
    "workerGroupSpecs",
    "rayVersion",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headServiceAnnotations",
    "suspend",
}
_HEAD = {"serviceType", "headService", "enableIngress", "rayStartParams", "template"}
_WORKERS = {
    "groupName",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "numOfHosts",
    "rayStartParams",
    "template",
    "scaleStrategy",
}


def ray_groups(cluster: Resource) -> list[Resource]:
    """Return the groups of pods of a RayCluster, the head's first."""
    spec = cluster["spec"]
    return [spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())]


def check_custom(body: Resource, version: str) -> bool:
    """Check an object of a kind that is not Kubernetes' own; False where it is no such kind.

    Raises:
        ValueError, kubernetes_validate.ValidationError: it does not fit its schema.

    """
    if (body["apiVersion"], body["kind"]) != ("ray.io/v1", "RayCluster"):
        return False
    _check_fields(body["spec"], _CLUSTER, {"headGroupSpec"})
    head, *workers = ray_groups(body)
    _check_fields(head, _HEAD, {"rayStartParams", "template"})
    for group in workers:
        required = {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        _check_fields(group, _WORKERS, required)
    for group in (head, *workers):
        pods = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "ray"},
            "template": group["template"],
        }
        kubernetes_validate.validate(pods, version, strict=True)
    return True


def _check_fields(found: Resource, known: set[str], required: set[str]) -> None:
    expect(found.keys() <= known, f"unknown fields: {sorted(found.keys() - known)}")
    expect(found.keys() >= required, f"missing fields: {sorted(required - found.keys())}")
