"""Kubernetes objects of a deployment: servers, the router before them, and what measures them."""

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.domain.hardware.device import find_device
from foretoken.simulator.launch.server import (
    POD_ADDRESS,
    SERVER_PORT,
    STARTUP_S,
    Launch,
    LaunchPool,
)

Manifest = dict[str, Any]

# How often the kubelet asks a server that starts.
_START_PERIOD_S = 10
# How long the measurement can be fetched.
_KEPT_S = 86_400
_SHARED_MEMORY = "16Gi"


# The label that all objects of a deployment have.
PART = "app.kubernetes.io/part-of=foretoken-deployment"


def label_of(name: str) -> dict[str, str]:
    """Return the labels by which objects of a part find each other."""
    key, _, value = PART.partition("=")
    return {"app.kubernetes.io/name": name, key: value}


def server_urls(name: str, num_replicas: int) -> list[str]:
    """Return the addresses of the replicas of a stateful set."""
    return [f"http://{name}-{index}.{name}:{SERVER_PORT}" for index in range(num_replicas)]


def server_manifests(pool: LaunchPool, launch: Launch, *, names_device: bool) -> list[Manifest]:
    """Return the stateful set of a pool's replicas, each with a name of its own, and its service.

    With `names_device` its pods ask for nodes of their device, as NVIDIA's feature discovery labels
    them.
    """
    name, labels = pool.pool.name, label_of(pool.pool.name)
    spec: Manifest = {
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_server_container(pool, launch)],
        "volumes": [
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY},
            },
            {"name": "models", "emptyDir": {}},
        ],
    }
    if names_device:
        product = find_device(pool.scenario.device).vendor_names[0].replace(" ", "-")
        spec["nodeSelector"] = {"nvidia.com/gpu.product": product}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "serviceName": name,
                "replicas": pool.pool.num_replicas,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
        # The replicas find each other before they are ready.
        _service(name, {"clusterIP": "None", "publishNotReadyAddresses": True}),
    ]


def router_manifests(launch: Launch) -> list[Manifest]:
    """Return the router and the service that clients talk to."""
    name, labels = "router", label_of("router")
    container: Manifest = {
        "name": name,
        "image": launch.image,
        "command": list(launch.command),
        "env": _variables({"HOME": "/home/router", **launch.variables}),
        "ports": [{"name": "http", "containerPort": SERVER_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": {"memory": "4Gi"},
        },
        "securityContext": _restricted(),
        "volumeMounts": [
            {"name": "home", "mountPath": "/home/router"},
            {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108 - in the container
        ],
    }
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _unprivileged(),
        "containers": [container],
        "volumes": [
            {"name": "home", "emptyDir": {}},
            {"name": "temporary", "emptyDir": {}},
        ],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    return [deployment, _service(name, {})]


def measurement_manifests(scenario_text: str, collect: Sequence[str], image: str) -> list[Manifest]:
    """Return a job that replays the scenario's workload, and the scenario that it reads.

    `collect` writes the run into a file. The job's last container keeps it until the job is
    deleted, at most a day: a log of that size would be rotated.
    """
    name, labels = "measure", label_of("measure")
    mounts = [
        {"name": "scenario", "mountPath": "/scenario", "readOnly": True},
        {"name": "results", "mountPath": "/results"},
        {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108 - in the container
    ]
    resources = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}

    def container(part: str, command: Sequence[str]) -> Manifest:
        return {
            "name": part,
            "image": image,
            "command": list(command),
            "env": _variables({"HOME": "/results", "FORETOKEN_HOME": "/results/foretoken"}),
            "resources": resources,
            "securityContext": _restricted(),
            "volumeMounts": mounts,
        }

    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _unprivileged(),
        "initContainers": [container("collect", collect)],
        "containers": [container("run", ["sleep", str(_KEPT_S)])],
        "volumes": [
            {"name": "scenario", "configMap": {"name": "measured-scenario"}},
            {"name": "results", "emptyDir": {}},
            {"name": "temporary", "emptyDir": {}},
        ],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "measured-scenario", "labels": labels},
            "data": {"scenario.yaml": scenario_text},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "backoffLimit": 0,
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
    ]


def _server_container(pool: LaunchPool, launch: Launch) -> Manifest:
    variables = {"HF_HOME": "/models", **launch.variables}
    devices = {"nvidia.com/gpu": str(pool.num_devices)}
    return {
        "name": "server",
        "image": launch.image,
        "command": list(launch.command),
        "env": [
            *_variables(variables),
            {
                "name": "HF_TOKEN",
                "valueFrom": {
                    "secretKeyRef": {"name": "hugging-face", "key": "token", "optional": True}
                },
            },
        ],
        "ports": [{"name": "http", "containerPort": SERVER_PORT}],
        "resources": {"requests": devices, "limits": devices},
        "securityContext": {"allowPrivilegeEscalation": False},
        "startupProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": _START_PERIOD_S,
            "failureThreshold": STARTUP_S // _START_PERIOD_S,
        },
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - in the container
            {"name": "models", "mountPath": "/models"},
        ],
    }


def _variables(variables: Mapping[str, str]) -> list[Manifest]:
    """Return environment variables; those that use the pod's address come after it."""
    entries: list[Manifest] = []
    if any(POD_ADDRESS in value for value in variables.values()):
        source = {"fieldRef": {"fieldPath": "status.podIP"}}
        entries.append({"name": POD_ADDRESS, "valueFrom": source})
    return entries + [
        {"name": name, "value": value.replace(f"{{{POD_ADDRESS}}}", f"$({POD_ADDRESS})")}
        for name, value in variables.items()
    ]


def _service(name: str, options: Mapping[str, object]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": label_of(name)},
        "spec": {
            **options,
            "selector": label_of(name),
            "ports": [{"name": "http", "port": SERVER_PORT, "targetPort": "http"}],
        },
    }


def _restricted() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _unprivileged() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
