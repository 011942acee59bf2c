"""Several catalogs over one lake: the manifests configure what the program understands."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kubernetes_manifests import Manifest, find, render

from foretoken.app.config import load_config
from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.domain import schema

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def manifests(repository: Path, find_tool: Callable[[str], str]) -> list[Manifest]:
    return render(find_tool("kubectl"), repository / "deploy/k8s/overlays/lake")


def test_the_variables_are_a_lake(manifests: list[Manifest]) -> None:
    variables = find(manifests, "ConfigMap", "catalog-lake")["data"]
    section = load_config(None, variables, {}).catalog
    config = schema.decode(CatalogConfig, {"path": "unused", **section})
    bucket = "s3://foretoken-example/measurements"
    assert LakeConfig(data_path=bucket, s3_region="eu-central-1") == config.lake


def test_every_catalog_has_the_variables_and_the_secrets(manifests: list[Manifest]) -> None:
    catalog = find(manifests, "StatefulSet", "catalog")["spec"]
    (container,) = catalog["template"]["spec"]["containers"]
    sources = {
        source["name"]: source.get("optional", False)
        for entry in container["envFrom"]
        for source in entry.values()
    }
    variables = find(manifests, "ConfigMap", "catalog-lake")["metadata"]["name"]
    assert {variables: False, "catalog-postgres": False, "catalog-bucket": True} == sources
    assert catalog["replicas"] > 1


def test_the_catalogs_have_one_address(manifests: list[Manifest]) -> None:
    """A check belongs to the pod that took it; a client that changes pods would not find it."""
    service = find(manifests, "Service", "catalog")
    assert "ClientIP" == service["spec"]["sessionAffinity"]
    assert "clusterIP" not in service["spec"]


def test_the_catalogs_reach_postgres_and_the_bucket(manifests: list[Manifest]) -> None:
    policy = find(manifests, "NetworkPolicy", "catalog-lake")["spec"]
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert {5432, 443} == ports
    assert {"app.kubernetes.io/name": "catalog"} == policy["podSelector"]["matchLabels"]
