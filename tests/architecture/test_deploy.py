"""The manifests render, are valid, and fit the program they start."""

import itertools
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_custom import ray_groups
from kubernetes_manifests import (
    OLDEST_VERSION,
    VARIANTS,
    Manifest,
    configs,
    environment,
    find,
    pods,
    render,
    templates,
)
from typer.testing import CliRunner

import foretoken
from foretoken.app.cli.main import app
from foretoken.catalog.config import CatalogConfig
from foretoken.domain import schema
from foretoken.domain.hardware.device import find_device
from foretoken.profiler.cluster.spec import KubernetesSpec
from foretoken.profiler.cluster.submitting import product_labels

# `make check` runs these.
pytestmark = pytest.mark.slow

_SERVICES = ("catalog", "predictor", "simulator")
_IMAGES = (*_SERVICES, "profiler")
# What speaks no gRPC: a Job, and pages.
_APART = {"profiler", "web"}
_PORT_OF_PAGES = 8080
# Kinds of operators that a cluster may have; their schemas are not part of Kubernetes.
_CUSTOM_KINDS = {"Certificate", "Issuer", "PodMonitor", "PrometheusRule", "RayCluster"}
_CLUSTER_KINDS = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
_CONTROLLER = "profiler-controller"


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(
    request: pytest.FixtureRequest, repository: Path, find_tool: Callable[[str], str]
) -> list[Manifest]:
    """Everything one variant applies."""
    return _render(repository, find_tool, request.param)


def _render(repository: Path, find_tool: Callable[[str], str], variant: str) -> list[Manifest]:
    return render(find_tool("kubectl"), repository / "deploy" / "k8s" / variant)


# The oldest that documents promise, and the newest.
@pytest.mark.parametrize("options", [("-k", "{}.{}".format(*OLDEST_VERSION)), ()])
def test_every_manifest_fits_the_schemas_of_kubernetes(
    options: Sequence[str],
    manifests: list[Manifest],
    find_tool: Callable[[str], str],
    tmp_path: Path,
) -> None:
    standard = [m for m in manifests if m["kind"] not in _CUSTOM_KINDS]
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(standard), encoding="utf-8")
    command = [find_tool("kubernetes-validate"), "--strict", "--quiet", *options, str(path)]
    validated = subprocess.run(command, capture_output=True, text=True, check=False)
    assert validated.returncode == 0, validated.stdout + validated.stderr


def test_everything_is_in_the_namespace(manifests: list[Manifest]) -> None:
    outside = {m["kind"] for m in manifests if m["metadata"].get("namespace") != "foretoken"}
    assert {"Namespace"} <= outside <= _CLUSTER_KINDS


def test_every_configuration_is_one_the_program_accepts(manifests: list[Manifest]) -> None:
    loaded, specs = configs(manifests), pods(manifests)
    assert set(_SERVICES) <= set(loaded) <= {*_SERVICES, *_APART, _CONTROLLER}
    for service in set(loaded) - _APART:
        server = loaded[service].server
        assert "0.0.0.0" == server.host  # noqa: S104 - of a pod
        ports = {p["name"]: p["containerPort"] for p in specs[service]["containers"][0]["ports"]}
        asked = {"grpc": server.port, "health": server.health_port, "metrics": server.metrics_port}
        assert {"grpc": 50051, "health": 50052, "metrics": 9090} == ports == asked
        grace_s = specs[service]["terminationGracePeriodSeconds"]
        assert server.drain_s + server.grace_s < grace_s
    catalog = schema.decode(CatalogConfig, {"path": "catalog.duckdb", **loaded["catalog"].catalog})
    assert catalog.memory_limit in {"1GB", "4GB"}


def test_probes_ask_the_port_that_speaks_in_the_clear(manifests: list[Manifest]) -> None:
    """A kubelet's probe speaks no TLS, and shows no token."""
    served = {name: pod for name, pod in pods(manifests).items() if name in configs(manifests)}
    for name in set(served) - _APART:
        (container,) = served[name]["containers"]
        asked = [container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "readiness")]
        assert [50052, 50052] == asked
        assert "health" == container["livenessProbe"]["tcpSocket"]["port"]


def test_no_policy_lets_others_than_a_kubelet_probe(manifests: list[Manifest]) -> None:
    """The node of a pod reaches all its ports, whatever policies say; others what they name."""
    policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    assert {} in [policy["podSelector"] for policy in policies if "ingress" not in policy]
    probed = [
        template["metadata"]["labels"]
        for _, template in templates(manifests)
        if "livenessProbe" in template["spec"]["containers"][0]
    ]
    assert len(probed) >= len(_SERVICES)
    admitted = {
        port["port"]
        for policy in policies
        if any(policy["podSelector"].get("matchLabels", {}).items() <= p.items() for p in probed)
        for rule in policy.get("ingress", ())
        for port in rule["ports"]
    }
    pages = {_PORT_OF_PAGES} if "web" in configs(manifests) else set()
    assert {50051, *pages} <= admitted <= {50051, 9090, *pages}


def test_every_endpoint_is_a_service_on_its_port(manifests: list[Manifest]) -> None:
    ports = {
        m["metadata"]["name"]: m["spec"]["ports"][0]["port"]
        for m in manifests
        if m["kind"] == "Service"
    }
    endpoints = {
        endpoint
        for config in configs(manifests).values()
        for endpoint in (config.endpoints.catalog, config.endpoints.predictor)
        if endpoint != "embedded"
    }
    assert endpoints <= {f"dns:///{name}:{port}" for name, port in ports.items()}
    assert endpoints != set()


def test_autoscalers_can_scale_what_they_name(manifests: list[Manifest]) -> None:
    """A Deployment that names its replicas would undo the scaling at every apply."""
    scaled = {m["metadata"]["name"]: m["spec"] for m in manifests if "Autoscaler" in m["kind"]}
    assert {"predictor", "simulator"} == set(scaled)
    for name, spec in scaled.items():
        deployment = find(manifests, "Deployment", name)
        target = (deployment["kind"], deployment["metadata"]["name"])
        assert target == (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        assert "replicas" not in deployment["spec"]
        assert 1 <= spec["minReplicas"] <= spec["maxReplicas"]
        assert "cpu" in pods([deployment])[name]["containers"][0]["resources"]["requests"]


def test_what_scales_keeps_nothing_and_spreads_over_nodes(manifests: list[Manifest]) -> None:
    budgets = {m["metadata"]["name"] for m in manifests if m["kind"] == "PodDisruptionBudget"}
    for name in ("predictor", "simulator"):
        deployment = find(manifests, "Deployment", name)
        pod = pods([deployment])[name]
        volumes = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
        volumes.pop("tls", None)
        assert {"config": {"configMap"}, "data": {"emptyDir"}, "tmp": {"emptyDir"}} == volumes
        assert [name] == [
            constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/name"]
            for constraint in pod["topologySpreadConstraints"]
        ]
        assert 0 == deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"]
        assert name in budgets


def test_jobs_have_one_address_and_questions_all_of_them(manifests: list[Manifest]) -> None:
    services = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "Service"}
    for name in ("predictor", "simulator"):
        assert "clusterIP" not in services[name]
        assert "None" == services[f"{name}-pods"]["clusterIP"]
    asked = configs(manifests)["simulator"].endpoints.predictor
    assert "dns:///predictor-pods:50051" == asked


def test_every_selector_finds_pods(manifests: list[Manifest]) -> None:
    labels = [template["metadata"]["labels"].items() for _, template in templates(manifests)]
    # Pods of profiles are made from outside, or by the controller.
    labels.append({"app.kubernetes.io/name": "profiler"}.items())
    # KubeRay's operator makes these.
    clusters = [m for m in manifests if m["kind"] == "RayCluster"]
    groups = itertools.chain.from_iterable(map(ray_groups, clusters))
    labels.extend(group["template"]["metadata"]["labels"].items() for group in groups)
    selectors = {
        f"{m['kind']}/{m['metadata']['name']}": _selector(m)
        for m in manifests
        if m["kind"] in ("Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy")
    }
    missed = [
        name
        for name, selector in selectors.items()
        if not any(selector.items() <= pod_labels for pod_labels in labels)
    ]
    assert missed == []


def test_no_pod_has_more_rights_than_it_needs(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        (container,) = pod["containers"]
        rights = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
        # The controller alone speaks to the API server.
        assert (name == _CONTROLLER) == pod.get("automountServiceAccountToken", True)
        assert (True, False) == (
            rights["readOnlyRootFilesystem"],
            rights["allowPrivilegeEscalation"],
        )
        assert ["ALL"] == rights["capabilities"]["drop"]
        assert {"requests", "limits"} == set(container["resources"])
        assert "1" == environment(pod)["OMP_NUM_THREADS"]


def test_every_image_has_the_version(manifests: list[Manifest]) -> None:
    """The tags that the base sets do not reach what components add."""
    images = {c["image"] for pod in pods(manifests).values() for c in pod["containers"]}
    assert images <= {f"foretoken-{name}:{foretoken.__version__}" for name in _IMAGES}
    assert images != set()


def test_no_service_links_are_injected(manifests: list[Manifest]) -> None:
    """Kubernetes would add FORETOKEN_* variables for a service of that name: unknown settings."""
    assert {False} == {pod["enableServiceLinks"] for pod in pods(manifests).values()}


def test_the_profiler_takes_one_gpu_of_a_kind_and_one_share_per_index(
    repository: Path, find_tool: Callable[[str], str]
) -> None:
    manifests = _render(repository, find_tool, "overlays/gpu-profiler")
    pod = pods(manifests)["profiler"]
    assert "1" == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    cron = find(manifests, "CronJob", "profiler")["spec"]
    shards = environment(pod)["FORETOKEN_PROFILER__NUM_SHARDS"]
    assert str(cron["jobTemplate"]["spec"]["completions"]) == shards
    assert cron["suspend"]
    labels = product_labels(find_device(environment(pod)["DEVICE"]))
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] in labels


def test_the_controller_has_a_configuration_an_account_and_a_role(
    repository: Path, find_tool: Callable[[str], str]
) -> None:
    """It may do no more than the tests of the profiler need, and nothing to others' objects."""
    manifests = _render(repository, find_tool, f"overlays/{_CONTROLLER}")
    config = configs(manifests)[_CONTROLLER]
    assert config.profiler["place"] == "kubernetes"
    spec = schema.decode(KubernetesSpec, config.profiler["kubernetes"])
    pod = pods(manifests)[_CONTROLLER]
    assert spec.image in {c["image"] for c in pod["containers"]}
    bindings = [m for m in manifests if m["kind"] in {"RoleBinding", "ClusterRoleBinding"}]
    roles = {(m["kind"], m["metadata"]["name"]): m for m in manifests if "rules" in m}
    bound = [roles[b["roleRef"]["kind"], b["roleRef"]["name"]] for b in bindings]
    assert {pod["serviceAccountName"]} == {s["name"] for b in bindings for s in b["subjects"]}
    verbs = {v for role in bound for rule in role["rules"] for v in rule["verbs"]}
    assert {"create", "get", "list", "watch", "patch", "delete"} == verbs
    readable = {r for role in bound for rule in role["rules"] for r in rule["resources"]
                if {"get", "list", "watch"} & set(rule["verbs"])}  # fmt: skip
    assert {"jobs", "pods", "pods/log", "events", "nodes"} == readable
    changed = {r for role in bound for rule in role["rules"] for r in rule["resources"]
               if {"patch", "delete"} & set(rule["verbs"])}  # fmt: skip
    assert {"jobs"} == changed


def test_the_dockerfile_is_clean_and_its_targets_start_their_services(
    repository: Path, find_tool: Callable[[str], str]
) -> None:
    path = repository / "deploy" / "Dockerfile"
    linted = subprocess.run(
        [find_tool("hadolint"), str(path)], capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout
    targets = path.read_text(encoding="utf-8").split("\nFROM ")
    for service in _IMAGES:
        (target,) = (text for text in targets if f" AS {service}\n" in text)
        own = target.partition("\n\n")[0].splitlines()
        start = f'ENTRYPOINT ["foretoken", "serve", "{service}"]'
        assert ["USER 10001:10001", start] == own[-2:]


def test_the_backup_is_a_command_that_exists(repository: Path) -> None:
    path = repository / "deploy" / "k8s" / "components" / "catalog-backup" / "backup.yaml"
    cron, _ = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    (container,) = pods([cron])["catalog-backup"]["containers"]
    (script,) = container["args"]
    words = shlex.split(script.partition("\nls ")[0].replace("\\\n", " "))
    assert words[0] == "foretoken"
    outcome = CliRunner().invoke(app, [*words[1:], "--help"])
    assert (0, True) == (outcome.exit_code, "Copy the catalog" in outcome.output)


def _selector(manifest: Manifest) -> Mapping[str, str]:
    spec = manifest["spec"]
    selector: Mapping[str, Any] = spec.get("podSelector", spec.get("selector", {}))
    labels: Mapping[str, str] = selector.get("matchLabels", selector)
    return labels
