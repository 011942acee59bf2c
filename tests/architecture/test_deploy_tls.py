"""Identity in the cluster: who has the component speaks TLS, and shows a certificate of its own."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes_manifests import Manifest, configs, environment, find, pods, render

from foretoken.domain import schema
from foretoken.profiler.cluster.spec import SECRET_FILES, KubernetesSpec
from foretoken.wire.rights import rights_of

pytestmark = pytest.mark.slow

_FOLDER = "/etc/foretoken-tls"
_SERVICES = {"catalog", "predictor", "simulator", "profiler-controller"}
_CLIENTS = {"profiler", "catalog-backup"}


@pytest.fixture(scope="module")
def tree(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the manifests, to be changed."""
    target = tmp_path_factory.mktemp("deploy") / "k8s"
    shutil.copytree(repository / "deploy" / "k8s", target)
    return target


@pytest.fixture(scope="module")
def everything(tree: Path, find_tool: Callable[[str], str]) -> list[Manifest]:
    """Every component that has pods, with TLS."""
    names = ("catalog-backup", "profiler-controller", "profiler-job", "web", "tls-cert-manager")
    overlay = tree / "overlays" / "everything"
    overlay.mkdir()
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "foretoken",
        "resources": ["../../base"],
        "components": [f"../../components/{name}" for name in names],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return render(find_tool("kubectl"), overlay)


def _mounted(pod: Manifest) -> str:
    """Return the Secret that a pod mounts where its variables say that the files are."""
    (container,) = pod["containers"]
    (name,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == _FOLDER)
    (secret,) = (v["secret"] for v in pod["volumes"] if v["name"] == name)
    assert 0o440 == secret["defaultMode"]
    return str(secret["secretName"])


def test_every_service_wants_a_certificate_of_callers(everything: list[Manifest]) -> None:
    specs, loaded = pods(everything), configs(everything)
    for name in _SERVICES:
        server = loaded[name].server
        files = (server.tls_certificate_file, server.tls_key_file, server.tls_client_ca_file)
        assert (f"{_FOLDER}/tls.crt", f"{_FOLDER}/tls.key", f"{_FOLDER}/ca.crt") == files
        assert f"{name}-tls" == _mounted(specs[name])


def test_every_pod_shows_its_own_certificate_where_it_calls(everything: list[Manifest]) -> None:
    specs = pods(everything)
    assert _SERVICES | _CLIENTS | {"web"} == set(specs)
    for name, pod in specs.items():
        shown = {
            key: environment(pod)[f"FORETOKEN_CLIENT__{key}_FILE"] for key in ("CA", "CERT", "KEY")
        }
        expected = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        assert {key: f"{_FOLDER}/{file}" for key, file in expected.items()} == shown
        assert f"{name}-tls" == _mounted(pod)


def test_the_pods_of_the_controller_show_the_profilers(everything: list[Manifest]) -> None:
    """A copy of the controller's own key would let them do whatever it may."""
    section = configs(everything)["profiler-controller"].profiler["kubernetes"]
    spec = schema.decode(KubernetesSpec, section)
    assert "profiler-tls" == spec.catalog_secret
    assert set(SECRET_FILES) - {"token"} == set(spec.catalog_secret_keys)


def test_certificates_are_valid_for_the_names_that_callers_use(everything: list[Manifest]) -> None:
    valid_for = {
        name: service
        for service in (*_SERVICES, "web")
        for name in find(everything, "Certificate", service)["spec"]["dnsNames"]
        if name != "localhost"
    }
    pods_of = {
        m["metadata"]["name"]: m["spec"]["selector"]["app.kubernetes.io/name"]
        for m in everything
        if m["kind"] == "Service"
    }
    assert pods_of.items() <= valid_for.items()
    called = {
        urlsplit(address).path.strip("/").split(":")[0]
        for config in configs(everything).values()
        for address in schema.encode(config.endpoints).values()
        if address != "embedded"
    }
    assert {"catalog", "predictor-pods", "simulator"} == called & set(pods_of)


def test_every_secret_is_made_with_an_identity_of_its_own(everything: list[Manifest]) -> None:
    made = {
        m["spec"]["secretName"]: m["spec"].get("uris", [])
        for m in everything
        if m["kind"] == "Certificate" and not m["spec"].get("isCA")
    }
    assert {_mounted(pod) for pod in pods(everything).values()} | {
        "client-tls",
        "admin-tls",
    } == set(made)
    assert {
        name: [f"spiffe://foretoken/{name.removesuffix('-tls')}"] for name in made
    } == made  # fmt: skip


def test_every_identity_may_do_what_its_pods_do_and_no_more(everything: list[Manifest]) -> None:
    """What a pod's program calls of the others, and nobody without a name anything."""
    needed = {
        "predictor": {"reader", "record", "plan", "activate", "work"},
        "simulator": {"reader", "record", "delete", "work"},
        "profiler": {"recorder"},
        "profiler-controller": {"reader", "work"},
        "catalog-backup": {"backup"},
        "web": {"planner"},
        "client": {"recorder", "planner", "sql"},
        "admin": {"admin"},
    }
    expected = {f"spiffe://foretoken/{name}": rights for name, rights in needed.items()}
    for name in _SERVICES:
        callers = configs(everything)[name].server.callers
        assert expected == {caller: set(roles) for caller, roles in callers.items()}
        assert all(rights_of(roles) for roles in callers.values())


def test_the_pages_speak_tls_with_who_shows_no_certificate(everything: list[Manifest]) -> None:
    """Browsers have none. Its own callers are known by their tokens, as without TLS."""
    server = configs(everything)["web"].server
    assert (f"{_FOLDER}/tls.crt", f"{_FOLDER}/tls.key", "") == (
        server.tls_certificate_file,
        server.tls_key_file,
        server.tls_client_ca_file,
    )
    assert {"*": ("planner",)} == server.callers
    (container,) = pods(everything)["web"]["containers"]
    probes = [container[name]["httpGet"]["scheme"] for name in ("startupProbe", "readinessProbe")]
    assert ["HTTPS", "HTTPS"] == probes
    annotations = find(everything, "Ingress", "web")["metadata"]["annotations"]
    assert "HTTPS" == annotations["nginx.ingress.kubernetes.io/backend-protocol"]


def test_services_say_that_they_speak_tls(everything: list[Manifest]) -> None:
    protocols = {m["spec"]["ports"][0]["appProtocol"] for m in everything if m["kind"] == "Service"}
    assert {"https"} == protocols


def test_production_without_the_authority_of_callers_does_not_render(
    tree: Path, find_tool: Callable[[str], str]
) -> None:
    overlay = tree / "overlays" / "production"
    loaded = configs(render(find_tool("kubectl"), overlay))
    assert {f"{_FOLDER}/ca.crt"} == {config.server.tls_client_ca_file for config in loaded.values()}
    path = overlay / "kustomization.yaml"
    text = path.read_text()
    path.write_text(text.replace("  - ../../components/tls-cert-manager\n", ""))
    command = [find_tool("kubectl"), "kustomize", str(overlay)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    path.write_text(text)
    assert refused.returncode != 0
    assert "FORETOKEN_SERVER__TLS_CLIENT_CA_FILE" in refused.stderr


def test_in_another_namespace_everything_is_there(
    tree: Path, find_tool: Callable[[str], str], everything: list[Manifest]
) -> None:
    """A right of the whole cluster belongs to the account of that namespace, too."""
    assert everything
    overlay = tree / "overlays" / "elsewhere"
    overlay.mkdir()
    content = {"namespace": "elsewhere", "resources": ["../everything"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    manifests = render(find_tool("kubectl"), overlay)
    assert {"elsewhere"} == {
        subject["namespace"] for m in manifests for subject in m.get("subjects", ())
    }
    assert {"elsewhere", None} == {m["metadata"].get("namespace") for m in manifests}
    assert "elsewhere" == find(manifests, "Namespace", "elsewhere")["metadata"]["name"]
