"""The objects of a profile on a cluster: the Job, and what its pods read and meet by."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.cluster.api import Resource
from foretoken.profiler.cluster.spec import SECRET_FILES, KubernetesSpec, PodSetup

CONTAINER = "profiler"
INDEX_KEY = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"
NAME_ANNOTATION = "foretoken.dev/profile"
CONTENT_ANNOTATION = "foretoken.dev/content"
# Tells the objects of one submission from those of an earlier one, which are deleted meanwhile.
ATTEMPT_ANNOTATION = "foretoken.dev/attempt"
# On a Job that has all its pods read, and may start.
STARTED_ANNOTATION = "foretoken.dev/started"
_PART_OF = "app.kubernetes.io/part-of"
_NAME = "app.kubernetes.io/name"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# Of a pod's claim, by which its container names it.
_CLAIM = "gpu"
_CONFIG_FOLDER = "/etc/foretoken"
_SECRET_FOLDER = "/etc/foretoken-catalog"  # noqa: S105 - a folder, no secret
_HOME = "/var/lib/foretoken"
_USER = 10001
# Read by the pod's own user and group alone.
_SECRET_MODE = 0o440
# What etcd takes as one object, less some room.
_MAX_CONFIG_BYTES = 1_000_000
# Wrong usage, the program's exit status for it: it will be wrong again.
_USAGE_STATUS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """One profile as a Job: under which name, on which nodes, in how many pods.

    `products` are values of the product label, empty for the device `cpu`. `gpus_per_pod` is 0
    there. `is_group` pods time collectives together; others share the calls. `attempt` tells one
    submission from another.
    """

    job_name: str
    request: ProfileRequest
    num_pods: int
    products: tuple[str, ...] = ()
    gpus_per_pod: int = 0
    is_group: bool = False
    attempt: str = ""

    @property
    def objects_name(self) -> str:
        """Name of what the pods read and meet by."""
        return "-".join(filter(None, (self.job_name, self.attempt)))

    @property
    def labels(self) -> Mapping[str, str]:
        """What finds the objects of this profile."""
        return {_NAME: CONTAINER, _PART_OF: "foretoken"}


def build_config_map(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup) -> Resource:
    """Return the configuration and the request that the pods mount.

    Raises:
        InvalidRequestError: they are larger than an object may be.

    """
    data = {
        # JSON is YAML.
        "foretoken.yaml": json.dumps(_configuration(plan, spec, setup), indent=1),
        "request.json": json.dumps(schema.encode(plan.request)),
    }
    num_bytes = sum(len(text.encode()) for text in data.values())
    if num_bytes > _MAX_CONFIG_BYTES:
        raise InvalidRequestError.of_field(
            "calls",
            f"the request takes {num_bytes} bytes, an object of a cluster at most"
            f" {_MAX_CONFIG_BYTES}; split it into several profiles",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": plan.objects_name, "labels": dict(plan.labels)},
        "data": data,
    }


def build_secret(plan: JobPlan, setup: PodSetup) -> Resource:
    """Return what the pods show the catalog, made of this process's own files."""
    data = {key: base64.b64encode(value).decode() for key, value in setup.credentials.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": plan.objects_name, "labels": dict(plan.labels)},
        "type": "Opaque",
        "data": data,
    }


def build_service(plan: JobPlan, spec: KubernetesSpec) -> Resource:
    """Return the headless Service that gives pods which meet a name each, ready or not."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.objects_name, "labels": dict(plan.labels)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: plan.job_name},
            "ports": [{"name": "rendezvous", "port": spec.collectives.port}],
        },
    }


def owned_by(body: Resource, job: Resource) -> Resource:
    """Return an object that is deleted with the Job."""
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
    }
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}


def build_job(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup, content: str) -> Resource:
    """Return the Indexed Job, suspended; `content` tells another request under the same name.

    It owns what its pods read, so it must be there before that, and start after it.
    """
    num_pods = plan.num_pods
    # Pods that meet must all be there; others may come one after the other.
    parallelism = num_pods if plan.is_group else min(spec.parallelism or num_pods, num_pods)
    max_failed = spec.max_failed_shards if spec.max_failed_shards >= 0 else num_pods
    job: dict[str, Any] = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": parallelism,
        "backoffLimitPerIndex": spec.retries_per_shard,
        "maxFailedIndexes": min(max_failed, num_pods),
        "ttlSecondsAfterFinished": spec.ttl_s,
        "podFailurePolicy": _failure_policy(),
        "template": {
            "metadata": {
                "labels": {**spec.labels, **plan.labels},
                **({"annotations": dict(spec.annotations)} if spec.annotations else {}),
            },
            "spec": _pod(plan, spec, setup),
        },
    }
    if spec.deadline_s:
        job["activeDeadlineSeconds"] = spec.deadline_s
    labels = {**spec.labels, **plan.labels}
    if spec.queue:
        labels[_QUEUE_LABEL] = spec.queue
    annotations = {
        NAME_ANNOTATION: plan.request.name,
        CONTENT_ANNOTATION: content,
        ATTEMPT_ANNOTATION: plan.attempt,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": plan.job_name,
            "labels": labels,
            "annotations": {**spec.annotations, **annotations},
        },
        "spec": job,
    }


def start_job(spec: KubernetesSpec) -> Resource:
    """Return the change that lets a Job start; in a queue, Kueue does so when there is room."""
    started = {"metadata": {"annotations": {STARTED_ANNOTATION: "true"}}}
    return started if spec.queue else {**started, "spec": {"suspend": False}}


def _configuration(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup) -> Mapping[str, object]:
    client: dict[str, object] = {
        SECRET_FILES[key]: f"{_SECRET_FOLDER}/{key}" for key in _secret_keys(spec, setup)
    }
    if setup.uses_tls or client:
        client["use_tls"] = True
    profiler = {key: value for key, value in setup.profiler.items() if key != "state_folder"}
    if plan.is_group:
        endpoint = f"{plan.job_name}-0.{plan.objects_name}:{spec.collectives.port}"
        profiler["rendezvous"] = {"endpoint": endpoint, "num_nodes": plan.num_pods}
    else:
        profiler["num_shards"] = plan.num_pods
    return {
        "home": _HOME,
        "endpoints": {"catalog": setup.catalog},
        "client": client,
        "log": {"format": "json"},
        "profiler": profiler,
    }


def _failure_policy() -> Mapping[str, object]:
    return {
        "rules": [
            # A node that was taken away says nothing about the profile: not counted.
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": CONTAINER,
                    "operator": "In",
                    "values": [_USAGE_STATUS],
                },
            },
        ]
    }


def _secret_keys(spec: KubernetesSpec, setup: PodSetup) -> tuple[str, ...]:
    return spec.catalog_secret_keys if spec.catalog_secret else tuple(setup.credentials)


def _pod(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup) -> Mapping[str, object]:
    tolerations = spec.tolerations if plan.gpus_per_pod else ()
    pod: dict[str, object] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.grace_s,
        # Variables made of Services would only be noise, and FORETOKEN_* ones are settings.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, spec, setup)],
        "volumes": _volumes(plan, spec, setup),
        "nodeSelector": dict(spec.node_selector),
        "affinity": _affinity(plan, spec),
        "tolerations": [
            {key: value for key, value in schema.encode(toleration).items() if value}
            for toleration in tolerations
        ],
        "serviceAccountName": spec.service_account,
        "priorityClassName": spec.priority_class,
        "runtimeClassName": spec.runtime_class,
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
    }
    if plan.gpus_per_pod and spec.claim_template:
        pod["resourceClaims"] = [{"name": _CLAIM, "resourceClaimTemplateName": spec.claim_template}]
    if plan.is_group:
        pod["subdomain"] = plan.objects_name
        if spec.collectives.uses_host_network:
            pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    # What is empty is left to the cluster.
    return {key: value for key, value in pod.items() if value not in ({}, [], "")}


def _affinity(plan: JobPlan, spec: KubernetesSpec) -> Mapping[str, object]:
    affinity: dict[str, object] = {}
    if plan.products:
        expression = {
            "key": spec.product_label,
            "operator": "In",
            "values": list(plan.products),
        }
        affinity["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [expression]}]
            }
        }
    if plan.is_group:
        affinity["podAntiAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": {JOB_LABEL: plan.job_name}},
                    "topologyKey": "kubernetes.io/hostname",
                }
            ]
        }
    return affinity


def _container(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup) -> Mapping[str, object]:
    capabilities: dict[str, object] = {"drop": ["ALL"]}
    limits = {"memory": spec.memory_limit}
    resources: dict[str, object] = {
        "requests": {"cpu": spec.cpu_request, "memory": spec.memory_request},
        "limits": limits,
    }
    if plan.gpus_per_pod and spec.claim_template:
        resources["claims"] = [{"name": _CLAIM}]
    elif plan.gpus_per_pod:
        limits[spec.gpu_resource] = str(plan.gpus_per_pod)
    if plan.is_group:
        limits |= spec.collectives.resources
        if spec.collectives.locks_memory:
            capabilities["add"] = ["IPC_LOCK"]
    mounts = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "data", "mountPath": _HOME},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the pod alone
    ]
    if _secret_keys(spec, setup):
        mounts.append({"name": "catalog", "mountPath": _SECRET_FOLDER, "readOnly": True})
    if plan.is_group:
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108 - as above
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": ["foretoken", "profile", "--request", f"{_CONFIG_FOLDER}/request.json"],
        "env": _environment(plan, spec),
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        # The end of what a failed pod wrote is kept with its state.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    return {key: value for key, value in container.items() if value != ""}


def _environment(plan: JobPlan, spec: KubernetesSpec) -> list[Mapping[str, object]]:
    setting = "RENDEZVOUS__NODE_RANK" if plan.is_group else "SHARD_INDEX"
    variables = {
        "FORETOKEN_CONFIG": f"{_CONFIG_FOLDER}/foretoken.yaml",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        **(spec.collectives.environment if plan.is_group else {}),
    }
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_KEY}']"}}
    return [
        *({"name": name, "value": value} for name, value in variables.items()),
        {"name": f"FORETOKEN_PROFILER__{setting}", "valueFrom": index},
    ]


def _volumes(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup) -> list[Mapping[str, object]]:
    volumes: list[Mapping[str, object]] = [
        {"name": "config", "configMap": {"name": plan.objects_name}},
        {"name": "data", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    keys = _secret_keys(spec, setup)
    if keys:
        items = [{"key": key, "path": key} for key in keys]
        secret = {
            "secretName": spec.catalog_secret or plan.objects_name,
            "items": items,
            "defaultMode": _SECRET_MODE,
        }
        volumes.append({"name": "catalog", "secret": secret})
    if plan.is_group:
        memory = {"medium": "Memory", "sizeLimit": spec.collectives.shared_memory}
        volumes.append({"name": "shared-memory", "emptyDir": memory})
    return volumes
