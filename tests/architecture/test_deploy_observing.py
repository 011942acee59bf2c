"""What operators see of a cluster: spans, metrics, alerts and dashboards that fit the program."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes_manifests import Manifest, configs, find, render

from foretoken.app.telemetry.metric_table import OBSERVED, metrics_of

pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def programs(repository: Path) -> Iterator[Callable[[str], ModuleType]]:
    """The programs that make what monitoring takes, by name."""
    folder = str(repository / "deploy" / "monitoring")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)


def _series() -> dict[str, set[str]]:
    """Return the names that queries may have, with their labels."""
    found: dict[str, set[str]] = {}
    for service in OBSERVED:
        for one in metrics_of(service):
            labels = {*one.labels, "namespace", "pod", "job"}
            found[one.series(service)] = labels | ({"le"} if one.kind == "histogram" else set())
    return found


def _used(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of ours in a query, each with the labels it selects by."""
    for name, selector in re.findall(r"(foretoken_\w+)(?:\{([^}]*)\})?", expr):
        yield name, set(re.findall(r"(\w+)=", selector))


def _rules(repository: Path) -> Mapping[str, list[Mapping[str, Any]]]:
    path = repository / "deploy" / "k8s" / "components" / "alerts" / "alerts.yaml"
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["groups"]
    return {group["name"]: group["rules"] for group in groups}


def test_what_is_committed_is_what_the_programs_make(
    repository: Path, programs: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    components = repository / "deploy" / "k8s" / "components"
    programs("alerts").write_rules(tmp_path / "alerts.yaml")
    assert (components / "alerts" / "alerts.yaml").read_text() == (
        tmp_path / "alerts.yaml"
    ).read_text()
    programs("dashboards").write_dashboards(tmp_path)
    for service in OBSERVED:
        name = f"{service}.json"
        committed = (components / "dashboards" / name).read_text()
        assert committed == (tmp_path / name).read_text(), "run `make monitoring`"
    page = (repository / "docs" / "reference" / "service-metrics.md").read_text()
    assert page == programs("reference").build_page(), "run `make monitoring`"


def test_alerts_look_at_metrics_that_there_are(repository: Path) -> None:
    series = _series()
    for group, rules in _rules(repository).items():
        for rule in rules:
            used = list(_used(rule["expr"]))
            assert used or group == "foretoken-process"
            for name, labels in used:
                assert labels <= series[name], rule["alert"]


def test_every_alert_has_a_page_and_every_page_an_alert(repository: Path) -> None:
    named = {
        rule["alert"]: rule["annotations"]["runbook"]
        for rules in _rules(repository).values()
        for rule in rules
    }
    pages = {path.stem: path for path in (repository / "docs" / "runbooks").glob("*.md")}
    assert set(named) == set(pages)
    for name, path in pages.items():
        assert repository / named[name] == path
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {name}\n")
        assert ["## Look", "## Do"] == re.findall("^## .*", text, re.MULTILINE)


def test_pages_query_metrics_that_there_are(repository: Path) -> None:
    series = _series()
    families = {re.sub(r"_(total|bucket)$", "", name) for name in series}
    for path in (repository / "docs" / "runbooks").glob("*.md"):
        for block in re.findall(r"```promql\n(.*?)```", path.read_text(), re.DOTALL):
            for name, labels in _used(block):
                family = re.sub(r"_(total|bucket|sum|count)$", "", name)
                assert family in families, (path.name, name)
                assert labels <= series.get(name, labels), (path.name, name)


def test_dashboards_show_every_metric_of_their_service(repository: Path) -> None:
    folder = repository / "deploy" / "k8s" / "components" / "dashboards"
    series = _series()
    for service in OBSERVED:
        board = json.loads((folder / f"{service}.json").read_text())
        assert f"foretoken-{service}" == board["uid"]
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        queries = [target["expr"] for panel in panels for target in panel["targets"]]
        shown = {name for query in queries for name, _ in _used(query)}
        assert {one.series(service) for one in metrics_of(service)} == shown
        for query in queries:
            for name, labels in _used(query):
                assert labels <= series[name]
        places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
        assert len(places) == len(set(places))
        assert len(board["panels"]) == len({panel["id"] for panel in board["panels"]})


def test_grafana_finds_the_dashboards(
    repository: Path, find_tool: Callable[[str], str], tmp_path: Path
) -> None:
    names = ("alerts", "dashboards", "pod-monitor")
    manifests = _with_components(find_tool("kubectl"), repository, tmp_path, *names)
    found = find(manifests, "ConfigMap", "foretoken-dashboards")
    assert {"grafana_dashboard": "1"} == found["metadata"]["labels"]
    assert {f"foretoken-{service}.json" for service in OBSERVED} == set(found["data"])
    # What an object may have, in all.
    assert sum(map(len, found["data"].values())) < 1_000_000
    assert "foretoken" == find(manifests, "PrometheusRule", "foretoken")["metadata"]["namespace"]
