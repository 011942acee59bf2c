"""Several catalogs over one lake: the manifests configure what the program understands."""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretoken.app.config import load_config
from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.domain import schema

Manifest = Mapping[str, Any]


@pytest.fixture(scope="module")
def manifests(repository: Path, find_tool: Callable[[str], str]) -> list[Manifest]:
    command = [find_tool("kubectl"), "kustomize", str(repository / "deploy/k8s/overlays/lake")]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(rendered.stdout))


def _find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (
        m for m in manifests if m["kind"] == kind and m["metadata"]["name"].startswith(name)
    )
    return found


def test_the_variables_are_a_lake(manifests: list[Manifest]) -> None:
    variables = _find(manifests, "ConfigMap", "catalog-lake")["data"]
    section = load_config(None, variables, {}).catalog
    config = schema.decode(CatalogConfig, {"path": "unused", **section})
    bucket = "s3://foretoken-example/measurements"
    assert LakeConfig(data_path=bucket, s3_region="eu-central-1") == config.lake


def test_every_catalog_has_the_variables_and_the_secrets(manifests: list[Manifest]) -> None:
    catalog = _find(manifests, "StatefulSet", "catalog")["spec"]
    (container,) = catalog["template"]["spec"]["containers"]
    sources = {
        source["name"]: source.get("optional", False)
        for entry in container["envFrom"]
        for source in entry.values()
    }
    variables = _find(manifests, "ConfigMap", "catalog-lake")["metadata"]["name"]
    assert {variables: False, "catalog-postgres": False, "catalog-bucket": True} == sources
    assert catalog["replicas"] > 1


def test_the_catalogs_have_one_address(manifests: list[Manifest]) -> None:
    """A check belongs to the pod that took it; a client that changes pods would not find it."""
    (service,) = (
        m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == "catalog"
    )
    assert "ClientIP" == service["spec"]["sessionAffinity"]
    assert "clusterIP" not in service["spec"]


def test_the_catalogs_reach_postgres_and_the_bucket(manifests: list[Manifest]) -> None:
    policy = _find(manifests, "NetworkPolicy", "catalog-lake")["spec"]
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert {5432, 443} == ports
    assert {"app.kubernetes.io/name": "catalog"} == policy["podSelector"]["matchLabels"]
