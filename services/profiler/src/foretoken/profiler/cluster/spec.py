"""Settings of profiling on Kubernetes: section `profiler.kubernetes`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import foretoken
from foretoken.domain.errors import FieldViolation, InvalidRequestError, at_least, find_violations

# Files of `client` by the key of the Secret that holds their content for the pods.
SECRET_FILES: Mapping[str, str] = {
    "token": "token_file",
    "ca.crt": "ca_file",
    "tls.crt": "cert_file",
    "tls.key": "key_file",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TolerationSpec:
    """A taint of nodes that pods may run in spite of."""

    key: str = ""
    operator: str = "Exists"
    value: str = ""
    effect: str = ""


def _gpu_tolerations() -> tuple[TolerationSpec, ...]:
    return (TolerationSpec(key="nvidia.com/gpu", effect="NoSchedule"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSpec:
    """Pods that time collectives together, one a node with all its GPUs.

    `gpus_per_node` 0 takes what the chosen nodes have. They meet at `port` of the first pod.
    `resources` are what the network needs, such as `rdma/hca: "1"`. `locks_memory` adds the
    capability IPC_LOCK and `uses_host_network` the node's own network, which a namespace with
    restricted pod security refuses. `shared_memory` is the size of /dev/shm.
    """

    gpus_per_node: int = 0
    port: int = 29500
    resources: Mapping[str, str] = field(default_factory=dict)
    shared_memory: str = "8Gi"
    locks_memory: bool = False
    uses_host_network: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesSpec:
    """How profiles run as Indexed Jobs.

    Without `kubeconfig` and `context` a pod takes its service account, any other machine its
    usual kubeconfig. Without `namespace` it is the context's, or the pod's own.

    `num_shards` pods share a profile, `parallelism` of them at the same time (0: all). `catalog` is
    the catalog's address as pods see it (empty: as this process does). What they show it is in
    `catalog_secret` under `catalog_secret_keys` (those of `SECRET_FILES`); without one, a Secret is
    made of the files that the section `client` names.

    Pods go to nodes whose label `product_label` is one of the device's names, with spaces as
    dashes, or `product`, and which carry the labels of `node_selector`. A shard gets one
    `gpu_resource`, a shard on the device `cpu` none. With `claim_template` a pod gets what that
    ResourceClaimTemplate of the namespace claims instead: its selectors choose the device, no label
    does, and a pod of collectives has `gpus_per_node` of them by it. `queue` is the Kueue queue
    that lets the Job start.

    A shard is tried `retries_per_shard` more times, `max_failed_shards` (-1: any number) may fail
    before the rest is stopped. The Job may run for `deadline_s` (0: any time) and is deleted
    `ttl_s` after its end. Where nothing has run for `start_s_max` (0: any time) since it was made,
    or its queue let it start, it is given up and deleted. `follow_s` is how often the pods are
    looked at, `lost_s_max` how long the API server may be away, and `refused_s_max` how long one
    that starts may not know its callers.

    With `shares_jobs` profiles are in the catalog, which all controllers that have it share: each
    knows all of them, and follows those of one that was not heard of for `job_lease_s`.
    """

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    image: str = f"foretoken-profiler:{foretoken.__version__}"
    image_pull_policy: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    num_shards: int = 1
    parallelism: int = 0
    catalog: str = ""
    catalog_secret: str = ""
    catalog_secret_keys: tuple[str, ...] = ("token",)
    product: str = ""
    product_label: str = "nvidia.com/gpu.product"
    gpu_resource: str = "nvidia.com/gpu"
    claim_template: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[TolerationSpec, ...] = field(default_factory=_gpu_tolerations)
    cpu_request: str = "2"
    memory_request: str = "8Gi"
    memory_limit: str = "32Gi"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    service_account: str = ""
    priority_class: str = ""
    runtime_class: str = ""
    queue: str = ""
    retries_per_shard: int = 2
    max_failed_shards: int = -1
    deadline_s: int = 0
    start_s_max: int = 3_600
    ttl_s: int = 86_400
    grace_s: int = 60
    follow_s: int = 5
    lost_s_max: float = 600.0
    refused_s_max: float = 60.0
    shares_jobs: bool = False
    job_lease_s: float = 30.0
    collectives: CollectiveSpec = field(default_factory=CollectiveSpec)

    def __post_init__(self) -> None:
        """Check the numbers, and that the Secret's keys mean something here."""
        lowest = {
            "num_shards": 1,
            "parallelism": 0,
            "retries_per_shard": 0,
            "max_failed_shards": -1,
            "deadline_s": 0,
            "start_s_max": 0,
            "ttl_s": 0,
            "grace_s": 1,
            "follow_s": 1,
            "job_lease_s": 1,
        }
        checks = {name: at_least(self, least, name)[name] for name, least in lowest.items()}
        violations = find_violations(checks)
        unknown = ", ".join(sorted(set(self.catalog_secret_keys) - set(SECRET_FILES)))
        if unknown:
            known = ", ".join(SECRET_FILES)
            violations.append(
                FieldViolation("catalog_secret_keys", f"unknown: {unknown}; known are {known}")
            )
        if violations:
            raise InvalidRequestError.of_violations(violations, "profiler.kubernetes")


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSetup:
    """What pods are given: the catalog's address, what to show it, and how to profile.

    `credentials` are contents by the keys of `SECRET_FILES`; `profiler` is the configuration's
    section of that name without what concerns the cluster.
    """

    catalog: str
    uses_tls: bool = False
    credentials: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    profiler: Mapping[str, object] = field(default_factory=dict)
