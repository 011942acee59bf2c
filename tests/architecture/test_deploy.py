"""The manifests render, are valid, and fit the program they start."""

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from foretoken.app.cli.main import app
from foretoken.app.config import AppConfig, load_config
from foretoken.app.service_metrics import PredictorMetrics
from foretoken.catalog.config import CatalogConfig
from foretoken.domain import schema
from foretoken.predictor.drift import DriftReport
from foretoken.predictor.statistics import PredictionStatistics
from foretoken.profiler.cluster.spec import KubernetesSpec

_VARIANTS = (
    "base",
    "overlays/dev",
    "overlays/gpu-profiler",
    "overlays/lake",
    "overlays/production",
    "overlays/profiler-controller",
)
_SERVICES = ("catalog", "predictor", "profiler", "simulator")
# Kinds of operators that a cluster may have; their schemas are not part of Kubernetes.
_CUSTOM_KINDS = {"PodMonitor", "PrometheusRule"}
_CLUSTER_KINDS = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
_CONTROLLER = "profiler-controller"

Manifest = Mapping[str, Any]


@pytest.fixture(scope="module", params=_VARIANTS)
def manifests(
    request: pytest.FixtureRequest, repository: Path, find_tool: Callable[[str], str]
) -> list[Manifest]:
    """Everything one variant applies."""
    return _render(repository, find_tool, request.param)


def _render(repository: Path, find_tool: Callable[[str], str], variant: str) -> list[Manifest]:
    folder = repository / "deploy" / "k8s" / variant
    command = [find_tool("kubectl"), "kustomize", str(folder)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (rendered.returncode, rendered.stderr)
    return list(yaml.safe_load_all(rendered.stdout))


def test_every_manifest_fits_the_schemas_of_kubernetes(
    manifests: list[Manifest], find_tool: Callable[[str], str], tmp_path: Path
) -> None:
    standard = [m for m in manifests if m["kind"] not in _CUSTOM_KINDS]
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(standard), encoding="utf-8")
    command = [find_tool("kubernetes-validate"), "--strict", "--quiet", str(path)]
    validated = subprocess.run(command, capture_output=True, text=True, check=False)
    assert validated.returncode == 0, validated.stdout + validated.stderr


def test_everything_is_in_the_namespace(manifests: list[Manifest]) -> None:
    outside = {m["kind"] for m in manifests if m["metadata"].get("namespace") != "foretoken"}
    assert {"Namespace"} <= outside <= _CLUSTER_KINDS


def test_every_configuration_is_one_the_program_accepts(manifests: list[Manifest]) -> None:
    configs = _configs(manifests)
    assert set(_SERVICES) == set(configs) - {_CONTROLLER}
    for service in ("catalog", "predictor", "simulator"):
        server = configs[service].server
        assert ("0.0.0.0", 50051, 9090) == (server.host, server.port, server.metrics_port)  # noqa: S104
        grace_s = _pod_spec(_workload(manifests, service))["terminationGracePeriodSeconds"]
        assert server.drain_s + server.grace_s < grace_s
    catalog = schema.decode(CatalogConfig, {"path": "catalog.duckdb", **configs["catalog"].catalog})
    assert catalog.memory_limit == "4GB"


def test_every_endpoint_is_a_service_on_its_port(manifests: list[Manifest]) -> None:
    ports = {
        m["metadata"]["name"]: m["spec"]["ports"][0]["port"]
        for m in manifests
        if m["kind"] == "Service"
    }
    endpoints = {
        endpoint
        for config in _configs(manifests).values()
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
        deployment = _workload(manifests, name)
        target = (deployment["kind"], deployment["metadata"]["name"])
        assert target == (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        assert "replicas" not in deployment["spec"]
        assert 1 <= spec["minReplicas"] <= spec["maxReplicas"]
        assert "cpu" in _pod_spec(deployment)["containers"][0]["resources"]["requests"]


def test_what_scales_keeps_nothing_and_spreads_over_nodes(manifests: list[Manifest]) -> None:
    budgets = {m["metadata"]["name"] for m in manifests if m["kind"] == "PodDisruptionBudget"}
    for name in ("predictor", "simulator"):
        deployment = _workload(manifests, name)
        pod = _pod_spec(deployment)
        volumes = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
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
    asked = _configs(manifests)["simulator"].endpoints.predictor
    assert "dns:///predictor-pods:50051" == asked


def test_every_selector_finds_pods(manifests: list[Manifest]) -> None:
    labels = [
        spec["template"]["metadata"]["labels"].items()
        for spec in (m.get("spec", {}) for m in manifests)
        for spec in (spec, spec.get("jobTemplate", {}).get("spec", {}))
        if "template" in spec
    ]
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
    pods = [_pod_spec(_workload(manifests, service)) for service in _SERVICES]
    pods += [_pod_spec(m["spec"]["jobTemplate"]) for m in manifests if m["kind"] == "CronJob"]
    for pod in pods:
        container = pod["containers"][0]
        rights = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
        assert not pod["automountServiceAccountToken"]
        assert (True, False) == (
            rights["readOnlyRootFilesystem"],
            rights["allowPrivilegeEscalation"],
        )
        assert ["ALL"] == rights["capabilities"]["drop"]
        assert {"requests", "limits"} == set(container["resources"])
        assert "1" == {e["name"]: e.get("value") for e in container["env"]}["OMP_NUM_THREADS"]


def test_no_service_links_are_injected(manifests: list[Manifest]) -> None:
    """Kubernetes would add FORETOKEN_* variables for a service of that name: unknown settings."""
    for service in _SERVICES:
        assert not _pod_spec(_workload(manifests, service))["enableServiceLinks"]


def test_the_profiler_takes_one_gpu_and_one_share_per_index(manifests: list[Manifest]) -> None:
    job = _workload(manifests, "profiler")["spec"]
    container = job["template"]["spec"]["containers"][0]
    shards = {e["name"]: e.get("value") for e in container["env"]}["FORETOKEN_PROFILER__NUM_SHARDS"]
    assert "1" == container["resources"]["limits"]["nvidia.com/gpu"]
    assert str(job["completions"]) == shards


def test_a_suspended_job_is_all_that_profiles_until_an_overlay_names_a_gpu(
    manifests: list[Manifest],
) -> None:
    job = _workload(manifests, "profiler")["spec"]
    product = job["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"]
    assert (product == "set-by-overlay") == job["suspend"]


def test_the_controller_has_a_configuration_an_account_and_a_role(
    repository: Path, find_tool: Callable[[str], str]
) -> None:
    """It may do no more than the tests of the profiler need, and nothing to others' objects."""
    manifests = _render(repository, find_tool, f"overlays/{_CONTROLLER}")
    config = _configs(manifests)[_CONTROLLER]
    assert config.profiler["place"] == "kubernetes"
    spec = schema.decode(KubernetesSpec, config.profiler["kubernetes"])
    pod = _pod_spec(_workload(manifests, _CONTROLLER))
    server = config.server
    assert ("0.0.0.0", 50051, 9090) == (server.host, server.port, server.metrics_port)  # noqa: S104
    assert server.drain_s + server.grace_s < pod["terminationGracePeriodSeconds"]
    (image,) = {c["image"] for c in _pod_spec(_workload(manifests, "profiler"))["containers"]}
    assert image == spec.image
    bindings = [m for m in manifests if m["kind"] in {"RoleBinding", "ClusterRoleBinding"}]
    roles = {(m["kind"], m["metadata"]["name"]): m for m in manifests if "rules" in m}
    bound = [roles[b["roleRef"]["kind"], b["roleRef"]["name"]] for b in bindings]
    assert {pod["serviceAccountName"]} == {s["name"] for b in bindings for s in b["subjects"]}
    verbs = {v for role in bound for rule in role["rules"] for v in rule["verbs"]}
    assert {"create", "get", "list", "watch", "patch", "delete"} == verbs
    readable = {r for role in bound for rule in role["rules"] for r in rule["resources"]
                if {"get", "list", "watch"} & set(rule["verbs"])}  # fmt: skip
    assert {"jobs", "pods", "pods/log", "nodes"} == readable


@pytest.mark.parametrize("service", _SERVICES)
def test_dockerfiles_are_clean_and_start_their_service(
    repository: Path, find_tool: Callable[[str], str], service: str
) -> None:
    path = repository / "services" / service / "Dockerfile"
    linted = subprocess.run(
        [find_tool("hadolint"), str(path)], capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[-1] == f'ENTRYPOINT ["foretoken", "serve", "{service}"]'
    assert "USER 10001:10001" in lines


def test_alerts_watch_metrics_that_the_predictor_has(repository: Path) -> None:
    path = repository / "deploy" / "k8s" / "components" / "predictor-alerts" / "alerts.yaml"
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["groups"]
    watched = {
        name
        for group in groups
        for rule in group["rules"]
        for name in re.findall(r"foretoken_\w+", rule["expr"])
    }
    observed = SimpleNamespace(
        statistics=PredictionStatistics(), drift=SimpleNamespace(report=DriftReport())
    )
    assert watched <= {metric.name for metric in PredictorMetrics(observed).collect()}
    assert watched != set()


def test_the_backup_is_a_command_that_exists(repository: Path) -> None:
    path = repository / "deploy" / "k8s" / "components" / "catalog-backup" / "backup.yaml"
    cron, _ = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    (container,) = _pod_spec(cron["spec"]["jobTemplate"])["containers"]
    (script,) = container["args"]
    words = shlex.split(script.partition("\nls ")[0].replace("\\\n", " "))
    assert words[0] == "foretoken"
    outcome = CliRunner().invoke(app, [*words[1:], "--help"])
    assert (0, True) == (outcome.exit_code, "Copy the catalog" in outcome.output)


def _configs(manifests: list[Manifest]) -> dict[str, AppConfig]:
    """Load every service's configuration as the service itself would."""
    configs: dict[str, AppConfig] = {}
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap" and "foretoken.yaml" in manifest["data"]:
            service = str(manifest["metadata"]["name"]).partition("-config")[0]
            content = yaml.safe_load(manifest["data"]["foretoken.yaml"])
            configs[service] = load_config(None, {}, content)
    return configs


def _workload(manifests: list[Manifest], name: str) -> Manifest:
    kinds = ("Deployment", "StatefulSet", "Job")
    (found,) = (m for m in manifests if m["kind"] in kinds and m["metadata"]["name"] == name)
    return found


def _pod_spec(workload: Manifest) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def _selector(manifest: Manifest) -> Mapping[str, str]:
    spec = manifest["spec"]
    selector: Mapping[str, Any] = spec.get("podSelector", spec.get("selector", {}))
    labels: Mapping[str, str] = selector.get("matchLabels", selector)
    return labels
