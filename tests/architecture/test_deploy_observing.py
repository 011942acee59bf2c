"""What operators see of a cluster: spans, metrics, alerts and dashboards that fit the program."""

import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from kubernetes_manifests import Manifest, configs, find, render


def _with_components(kubectl: str, repository: Path, folder: Path, *names: str) -> list[Manifest]:
    """Return the base with components, as an overlay has it."""
    tree = folder / "k8s"
    shutil.copytree(repository / "deploy" / "k8s", tree)
    overlay = tree / "overlays" / "observed"
    overlay.mkdir()
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "foretoken",
        "resources": ["../../base"],
        "components": [f"../../components/{name}" for name in names],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return render(kubectl, overlay)


def test_traced_pods_may_send_spans_to_where_they_do(
    repository: Path, find_tool: Callable[[str], str], tmp_path: Path
) -> None:
    names = ("profiler-controller", "tracing")
    manifests = _with_components(find_tool("kubectl"), repository, tmp_path, *names)
    (egress,) = find(manifests, "NetworkPolicy", "allow-tracing")["spec"]["egress"]
    (to,) = egress["to"]
    loaded = configs(manifests)
    assert {"catalog", "predictor", "profiler-controller", "simulator"} == set(loaded)
    for config in loaded.values():
        address = urlsplit(config.tracing.otlp_endpoint)
        _, _, namespace = str(address.hostname).partition(".")
        selected = to["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        assert (namespace, [{"protocol": "TCP", "port": address.port}]) == (
            selected,
            egress["ports"],
        )
