"""Searches on a Ray cluster of KubeRay's: the manifests fit its fields, Ray, and each other."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kubernetes_apply import VERSION
from kubernetes_custom import check_custom, ray_groups
from kubernetes_manifests import Manifest, configs, find, render

from foretoken.domain import schema
from foretoken.simulator.config import SimulatorConfig

pytestmark = pytest.mark.slow

_HEAD = "ray-head-svc"  # KubeRay names it by the cluster


@pytest.fixture(scope="module")
def manifests(repository: Path, find_tool: Callable[[str], str]) -> list[Manifest]:
    return render(find_tool("kubectl"), repository / "deploy/k8s/overlays/ray")


@pytest.fixture
def groups(manifests: list[Manifest]) -> list[dict[str, Any]]:
    return ray_groups({**find(manifests, "RayCluster", "ray")})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Ray's own program reads in the command of a group's container."""
    from ray.scripts.scripts import start

    (container,) = group["template"]["spec"]["containers"]
    assert ["ray", "start"] == container["command"]
    return dict(start.make_context("start", list(container["args"])).params)


def _ports(group: Mapping[str, Any]) -> dict[str, int]:
    (container,) = group["template"]["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_the_cluster_has_the_fields_of_kuberay(manifests: list[Manifest]) -> None:
    cluster = {**find(manifests, "RayCluster", "ray")}
    assert check_custom(cluster, VERSION)
    with pytest.raises(ValueError, match="unknown fields: \\['workers'\\]"):
        check_custom({**cluster, "spec": {**cluster["spec"], "workers": 3}}, VERSION)


def test_ray_understands_the_commands_and_serves_the_ports_that_are_named(
    groups: list[dict[str, Any]],
) -> None:
    head, workers = groups
    started, joined = _options(head), _options(workers)
    assert started["head"]
    assert started["block"]
    assert joined["block"]
    assert {
        "gcs-server": started["port"],
        "client": started["ray_client_server_port"],
        "raylet": started["node_manager_port"],
    } == _ports(head)
    assert {"raylet": joined["node_manager_port"]} == _ports(workers)
    assert f"{_HEAD}:{started['port']}" == joined["address"]
    (container,) = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == joined["num_cpus"]


def test_the_commands_and_probes_are_ours(
    manifests: list[Manifest], groups: list[dict[str, Any]]
) -> None:
    """KubeRay's own need wget and a dashboard; it leaves alone what is there."""
    annotations = find(manifests, "RayCluster", "ray")["metadata"]["annotations"]
    assert {"ray.io/overwrite-container-cmd": "true"} == annotations
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        assert {probe["tcpSocket"]["port"] for probe in probes} <= _ports(group).keys()


def test_simulators_are_clients_of_the_head_in_the_same_image(
    manifests: list[Manifest], groups: list[dict[str, Any]]
) -> None:
    section = configs(manifests)["simulator"].simulator
    config = schema.decode(SimulatorConfig, {"state_folder": "unused", **section})
    assert f"ray://{_HEAD}:{_ports(groups[0])['client']}" == config.ray_address
    simulator = find(manifests, "Deployment", "simulator")["spec"]
    images = {
        group["template"]["spec"]["containers"][0]["image"]
        for group in (*groups, {"template": simulator["template"]})
    }
    assert 1 == len(images)


def test_nothing_runs_as_root_or_writes_but_where_it_may(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert ["ALL"] == container["securityContext"]["capabilities"]["drop"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/var/lib/foretoken"} == mounted  # noqa: S108 - of a pod
        assert {"emptyDir", "name"} == {key for volume in pod["volumes"] for key in volume}


def test_policies_let_in_rays_own_pods_and_simulators_alone(
    manifests: list[Manifest], groups: list[dict[str, Any]]
) -> None:
    """Whoever reaches the head runs programs there."""
    policy = find(manifests, "NetworkPolicy", "ray")["spec"]
    ours = {"podSelector": policy["podSelector"]}
    for group in groups:
        labels = group["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    client = [{"protocol": "TCP", "port": _ports(groups[0])["client"]}]
    simulators = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "simulator"}}}
    assert [{"from": [ours]}, {"from": [simulators], "ports": client}] == policy["ingress"]
    assert [{"to": [ours]}] == policy["egress"]
    outwards = find(manifests, "NetworkPolicy", "simulator-to-ray")["spec"]
    assert simulators == {"podSelector": outwards["podSelector"]}
    assert [{"to": [ours], "ports": client}] == outwards["egress"]
