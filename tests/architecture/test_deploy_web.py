"""The component with the pages: it renders, is valid, and calls the services that there are."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kubernetes_manifests import Manifest, configs, environment, find, pods, render

import foretoken
from foretoken.app.config import SERVICES, ServerConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def manifests(repository: Path, find_tool: Callable[[str], str]) -> list[Manifest]:
    return render(find_tool("kubectl"), repository / "deploy" / "k8s" / "overlays" / "web")


def test_every_manifest_fits_the_schemas_of_kubernetes(
    manifests: list[Manifest], find_tool: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(manifests), encoding="utf-8")
    command = [find_tool("kubernetes-validate"), "--strict", "--quiet", str(path)]
    validated = subprocess.run(command, capture_output=True, text=True, check=False)
    assert validated.returncode == 0, validated.stdout + validated.stderr


def test_the_pages_call_services_that_there_are(manifests: list[Manifest]) -> None:
    config = configs(manifests)["web"]
    addresses = {
        f"dns:///{m['metadata']['name']}:{m['spec']['ports'][0]['port']}"
        for m in manifests
        if m["kind"] == "Service"
    }
    called = {getattr(config.endpoints, name) for name in SERVICES} - {"embedded"}
    assert 3 == len(called)
    assert called <= addresses


def test_the_ports_agree_and_nobody_is_let_in_unnamed(manifests: list[Manifest]) -> None:
    server = configs(manifests)["web"].server
    (container,) = pods(manifests)["web"]["containers"]
    policy = find(manifests, "NetworkPolicy", "web")["spec"]
    admitted = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert [server.http_port] == [port["containerPort"] for port in container["ports"]] == admitted
    assert "anonymous" not in server.callers
    folder = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tokens")
    assert f"{folder}/tokens" == server.token_file
    assert "http" == find(manifests, "Service", "web")["spec"]["ports"][0]["targetPort"]


def test_the_proxy_takes_what_the_server_takes(manifests: list[Manifest]) -> None:
    ingress = find(manifests, "Ingress", "web")
    annotations = ingress["metadata"]["annotations"]
    limit = annotations["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert f"{ServerConfig().http_max_bytes // 2**20}m" == limit
    assert "off" == annotations["nginx.ingress.kubernetes.io/proxy-buffering"]


def test_the_pod_has_no_more_rights_than_it_needs(manifests: list[Manifest]) -> None:
    pod = pods(manifests)["web"]
    (container,) = pod["containers"]
    assert (True, False) == (
        pod["securityContext"]["runAsNonRoot"],
        pod["automountServiceAccountToken"],
    )
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert "1" == environment(pod)["OMP_NUM_THREADS"]
    assert f"foretoken-simulator:{foretoken.__version__}" == container["image"]
