"""The objects of a profile on a cluster: as the API wants them, with what the settings say."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_server import KubernetesServer, ObjectStore

from foretoken.app.config import load_config
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import all_devices, find_device
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.cluster.api import ClusterApi
from foretoken.profiler.cluster.following import (
    JobView,
    describe_progress,
    find_pod_failures,
    parse_indexes,
)
from foretoken.profiler.cluster.objects import (
    JobPlan,
    build_config_map,
    build_job,
    build_secret,
    build_service,
    owned_by,
)
from foretoken.profiler.cluster.spec import CollectiveSpec, KubernetesSpec, PodSetup, TolerationSpec
from foretoken.profiler.cluster.submitting import (
    JobSubmitter,
    is_collective,
    name_of_job,
    product_labels,
)

_SETUP = PodSetup(catalog="dns:///catalog:50051")
_EVERYTHING = KubernetesSpec(
    image="registry.example.com/foretoken-profiler:1",
    image_pull_policy="Always",
    image_pull_secrets=("registry",),
    parallelism=2,
    catalog_secret="catalog-access",  # noqa: S106 - a name
    catalog_secret_keys=("token", "ca.crt", "tls.crt", "tls.key"),
    node_selector={"pool": "gpus"},
    tolerations=(TolerationSpec(key="a", operator="Equal", value="b", effect="NoExecute"),),
    labels={"team": "models"},
    annotations={"example.com/cost": "42"},
    service_account="profiler",
    priority_class="low",
    runtime_class="nvidia",
    queue="gpus",
    deadline_s=3600,
    max_failed_shards=1,
    collectives=CollectiveSpec(
        resources={"rdma/hca": "1"},
        locks_memory=True,
        uses_host_network=True,
        environment={"NCCL_DEBUG": "INFO"},
    ),
)


def _plan(*, is_group: bool = False, gpus: int = 1, num_pods: int = 4) -> JobPlan:
    request = ProfileRequest(device="h200_sxm", operators=("gemm",), name="Sweep of H200")
    return JobPlan(
        job_name=name_of_job(request.name),
        request=request,
        num_pods=num_pods,
        products=("NVIDIA-H200",) if gpus else (),
        gpus_per_pod=gpus,
        is_group=is_group,
    )


def _stored(plan: JobPlan, spec: KubernetesSpec, setup: PodSetup = _SETUP) -> dict[str, Any]:
    """Return the Job as a server that checks every object has it, with all it owns."""
    store = ObjectStore()
    job = store.create("jobs", dict(build_job(plan, spec, setup, "content")))
    for kind, body in (
        ("configmaps", build_config_map(plan, spec, setup)),
        ("secrets", build_secret(plan, setup)),
        ("services", build_service(plan, spec)),
    ):
        store.create(kind, dict(owned_by(body, job)))
    store.delete("jobs", plan.job_name)
    assert store.objects == {}
    return job


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("spec", [KubernetesSpec(), _EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("gpus", [0, 8])
def test_every_object_fits_the_schemas_and_goes_with_its_job(
    is_group: bool, spec: KubernetesSpec, gpus: int
) -> None:
    job = _stored(_plan(is_group=is_group, gpus=gpus), spec)
    assert ("Indexed", 4) == (job["spec"]["completionMode"], job["spec"]["completions"])


def test_a_shard_has_one_gpu_of_the_product_and_its_index() -> None:
    job = _stored(_plan(), KubernetesSpec(parallelism=3))["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (4, 3, 2, 4) == (
        job["completions"],
        job["parallelism"],
        job["backoffLimitPerIndex"],
        job["maxFailedIndexes"],
    )
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]}
    ] == required["nodeSelectorTerms"][0]["matchExpressions"]
    assert [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] == pod[
        "tolerations"
    ]
    index = next(e for e in container["env"] if e["name"] == "FORETOKEN_PROFILER__SHARD_INDEX")
    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    # What its pods read belongs to it, so it comes first and starts last.
    assert job["suspend"]


@pytest.mark.parametrize("is_group", [False, True])
def test_a_claim_stands_for_the_gpu(is_group: bool, tmp_path: Path) -> None:
    """By the template alone: no resource of a device plugin, no label that its nodes may lack."""
    spec = KubernetesSpec(claim_template="h200", collectives=CollectiveSpec(gpus_per_node=8))
    with KubernetesServer() as server:
        # No node says what GPUs it has.
        server.add_node("worker")
        connected = replace(spec, kubeconfig=str(server.write_kubeconfig(tmp_path)))
        api = ClusterApi.connect(connected)
        request = ProfileRequest(device="h200_sxm", operators=("gemm",), name="short")
        plan = JobSubmitter(api, connected, _SETUP).plan(request, is_group=is_group)
        api.close()
    assert (8 if is_group else 1) == plan.gpus_per_pod
    pod = _stored(plan, spec)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [{"name": "gpu", "resourceClaimTemplateName": "h200"}] == pod["resourceClaims"]
    assert [{"name": "gpu"}] == container["resources"]["claims"]
    assert {"memory"} == set(container["resources"]["limits"])
    assert "nodeAffinity" not in pod.get("affinity", {})


def test_how_many_gpus_a_claim_has_is_not_guessed(tmp_path: Path) -> None:
    with KubernetesServer() as server:
        kubeconfig = str(server.write_kubeconfig(tmp_path))
        spec = KubernetesSpec(kubeconfig=kubeconfig, claim_template="node")
        api = ClusterApi.connect(spec)
        request = ProfileRequest(device="h200_sxm", operators=("all_reduce",), name="short")
        with pytest.raises(InvalidRequestError, match="gpus_per_node"):
            JobSubmitter(api, spec, _SETUP).plan(request, is_group=True)
        api.close()


def test_a_part_of_a_gpu_is_a_device_of_its_own() -> None:
    """GPU feature discovery makes its label of its own name, not of the whole GPU's."""
    whole = find_device("a100_sxm_40")
    part = replace(whole, name="a100_1g", vendor_names=("NVIDIA A100-SXM4-40GB MIG 1g.5gb",))
    assert ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",) == product_labels(part)
    assert not set(product_labels(part)) & set(product_labels(whole))


def test_a_cpu_needs_no_gpu_and_tolerates_no_gpu_node() -> None:
    pod = _stored(_plan(gpus=0), KubernetesSpec())["spec"]["template"]["spec"]
    assert {"memory"} == set(pod["containers"][0]["resources"]["limits"])
    assert not {"affinity", "tolerations", "nodeSelector"} & set(pod)


def test_the_pods_hold_as_few_rights_as_the_namespace_asks() -> None:
    """What restricted pod security wants; it refuses any other pod."""
    pod = _stored(_plan(is_group=True), KubernetesSpec())["spec"]["template"]["spec"]
    rights = pod["containers"][0]["securityContext"]
    assert (True, "RuntimeDefault", False) == (
        pod["securityContext"]["runAsNonRoot"],
        pod["securityContext"]["seccompProfile"]["type"],
        rights["allowPrivilegeEscalation"],
    )
    assert {"drop": ["ALL"]} == rights["capabilities"]
    assert not pod["automountServiceAccountToken"]
    assert "hostNetwork" not in pod


def test_pods_that_meet_have_a_node_each_a_name_each_and_all_its_gpus() -> None:
    plan = _plan(is_group=True, gpus=8, num_pods=2)
    job = _stored(plan, KubernetesSpec(parallelism=1))["spec"]
    pod = job["template"]["spec"]
    assert (2, plan.job_name) == (job["parallelism"], pod["subdomain"])
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert {"medium": "Memory", "sizeLimit": "8Gi"} in [v.get("emptyDir") for v in pod["volumes"]]
    service = build_service(plan, KubernetesSpec())["spec"]
    assert ("None", True) == (service["clusterIP"], service["publishNotReadyAddresses"])
    content = json.loads(build_config_map(plan, KubernetesSpec(), _SETUP)["data"]["foretoken.yaml"])
    endpoint = f"{plan.job_name}-0.{plan.job_name}:29500"
    assert {"endpoint": endpoint, "num_nodes": 2} == content["profiler"]["rendezvous"]
    names = {entry["name"] for entry in pod["containers"][0]["env"]}
    assert "FORETOKEN_PROFILER__RENDEZVOUS__NODE_RANK" in names


def test_pods_read_a_configuration_and_a_request_that_the_program_takes() -> None:
    setup = PodSetup(catalog="catalog:50051", profiler={"num_threads": 2})
    data = build_config_map(_plan(), KubernetesSpec(), setup)["data"]
    config = load_config(None, {}, json.loads(data["foretoken.yaml"]))
    assert config.endpoints.catalog == "catalog:50051"
    assert {"num_threads": 2, "num_shards": 4} == dict(config.profiler)
    assert _plan().request == schema.decode(ProfileRequest, json.loads(data["request.json"]))


def test_what_the_catalog_is_shown_comes_from_a_secret() -> None:
    """Ours, made of this process's files, or one that is there already."""
    setup = PodSetup(catalog="catalog:50051", credentials={"token": b"abc", "ca.crt": b"---"})
    secret = build_secret(_plan(), setup)
    assert {"token": "abc", "ca.crt": "---"} == {
        key: base64.b64decode(value).decode() for key, value in secret["data"].items()
    }
    for spec, name, files in (
        (KubernetesSpec(), _plan().job_name, {"token_file", "ca_file"}),
        (_EVERYTHING, "catalog-access", {"token_file", "ca_file", "cert_file", "key_file"}),
    ):
        pod = _stored(_plan(), spec, setup)["spec"]["template"]["spec"]
        (volume,) = (v["secret"] for v in pod["volumes"] if "secret" in v)
        assert volume["secretName"] == name
        content = build_config_map(_plan(), spec, setup)["data"]["foretoken.yaml"]
        assert {*files, "use_tls"} == set(json.loads(content)["client"])


def test_a_request_larger_than_an_object_may_be_is_refused() -> None:
    call = OperatorCall(operator="gemm", dtype=DType.BF16, dims={"m": 1, "n": 4096, "k": 4096})
    request = ProfileRequest(device="cpu", calls=(call,) * 10_000, name="large")
    plan = JobPlan(job_name="large", request=request, num_pods=1)
    with pytest.raises(InvalidRequestError, match="split it"):
        build_config_map(plan, KubernetesSpec(), _SETUP)


@pytest.mark.parametrize("name", ["a", "Llama 3.1/8B, tp=4!", "x" * 200, "-", "ünïcode"])
def test_jobs_have_names_that_leave_room_for_an_index(name: str) -> None:
    store = ObjectStore()
    request = ProfileRequest(device="cpu", name=name)
    plan = JobPlan(job_name=name_of_job(name), request=request, num_pods=99_999)
    stored = store.create("jobs", dict(build_job(plan, KubernetesSpec(), _SETUP, "content")))
    assert stored["metadata"]["annotations"]["foretoken.dev/profile"] == name


def test_every_device_name_is_a_value_of_a_label() -> None:
    store = ObjectStore()
    for device in all_devices().values():
        for number, label in enumerate(product_labels(device)):
            labels = {"nvidia.com/gpu.product": label}
            name = f"{device.name.replace('_', '-')}-{number}"
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            node["metadata"]["labels"] = labels  # type: ignore[index]
            store.create("nodes", node)
    assert "NVIDIA-H200" in product_labels(all_devices()["h200_sxm"])


def test_collectives_run_apart_from_other_operators() -> None:
    assert is_collective(ProfileRequest(device="cpu", operators=("all_reduce", "all_gather")))
    assert not is_collective(ProfileRequest(device="cpu", operators=("gemm",)))
    assert not is_collective(ProfileRequest(device="cpu"))
    with pytest.raises(InvalidRequestError, match="one after the other"):
        is_collective(ProfileRequest(device="cpu", operators=("all_reduce", "gemm")))


def test_wrong_settings_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"num_shards.*at least 1"):
        KubernetesSpec(num_shards=0)
    with pytest.raises(InvalidRequestError, match="unknown: password"):
        KubernetesSpec(catalog_secret_keys=("password",))


def test_indexes_are_read_as_kubernetes_writes_them() -> None:
    assert () == parse_indexes("")
    assert (1, 3, 4, 5, 7) == parse_indexes("1,3-5,7")


def test_progress_says_what_is_wrong_first() -> None:
    view = JobView(num_pods=8, num_succeeded=3, num_running=4, num_waiting=1, num_failed_pods=2)
    assert (
        "job: 3 of 8 shards done, 4 running, 1 waiting, 2 pods failed and are tried again,"
        " 10 of 40 calls"
    ) == describe_progress("job", view, 10, 40)


def test_a_pod_without_memory_is_told_with_the_setting() -> None:
    terminated = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    pod = {
        "metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "3"}},
        "status": {"phase": "Failed", "containerStatuses": [{"state": terminated}]},
    }
    assert [
        "shard 3 ran out of memory: raise profiler.kubernetes.memory_limit"
    ] == find_pod_failures([pod])
