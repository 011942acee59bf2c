"""Every overlay is applied with `kubectl apply --server-side`, one over the other.

To the tests' own server; or to the cluster of the kubeconfig that `FORETOKEN_TEST_KUBECONFIG`
names, where nothing of this may be yet, and nothing is left of it afterwards.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from kubernetes_apply import ApplyServer
from kubernetes_manifests import OLDEST_VERSION, VARIANTS, Manifest, render

_KUBECONFIG = "FORETOKEN_TEST_KUBECONFIG"
_TIMEOUT_S = 120.0


class _Cluster:
    """A cluster by way of kubectl."""

    def __init__(self, kubectl: str, options: Sequence[str], *, is_own: bool) -> None:
        self._command = [kubectl, *options]
        # The tests' server has no schemas to send: it checks by those that it has.
        self._validate = ["--validate=false"] if is_own else ["--validate=strict"]
        self._resources = self.run("api-resources", "--no-headers").stdout

    def run(self, *arguments: str, content: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            input=content,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )

    def serves(self, manifest: Manifest) -> bool:
        """Whether it knows the kind: those of operators are in some clusters only."""
        words = [line.split() for line in self._resources.splitlines()]
        return any({manifest["apiVersion"], manifest["kind"]} <= set(line) for line in words)

    def apply(self, manifests: Sequence[Manifest]) -> subprocess.CompletedProcess[str]:
        """Apply what it knows, as one does by hand."""
        known = [manifest for manifest in manifests if self.serves(manifest)]
        arguments = ("apply", "--server-side", "--force-conflicts", *self._validate, "-f", "-")
        return self.run(*arguments, content=yaml.safe_dump_all(known))

    def delete(self, manifests: Sequence[Manifest]) -> None:
        known = [manifest for manifest in manifests if self.serves(manifest)]
        arguments = ("delete", "--ignore-not-found", "--wait=false", "-f", "-")
        self.run(*arguments, content=yaml.safe_dump_all(known))


@pytest.fixture(scope="module")
def variants(repository: Path, find_tool: Callable[[str], str]) -> dict[str, list[Manifest]]:
    folder = repository / "deploy" / "k8s"
    return {name: render(find_tool("kubectl"), folder / name) for name in VARIANTS}


@pytest.fixture(scope="module")
def server() -> Iterator[ApplyServer]:
    with ApplyServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(
    server: ApplyServer, variants: dict[str, list[Manifest]], find_tool: Callable[[str], str]
) -> Iterator[_Cluster]:
    kubectl, kubeconfig = find_tool("kubectl"), os.environ.get(_KUBECONFIG, "")
    if not kubeconfig:
        yield _Cluster(kubectl, ["--server", server.address, "--kubeconfig", ""], is_own=True)
        return
    cluster = _Cluster(kubectl, ["--kubeconfig", kubeconfig], is_own=False)
    spaces = {
        m["metadata"]["name"] for found in variants.values() for m in found
        if m["kind"] == "Namespace"
    }  # fmt: skip
    version = json.loads(cluster.run("get", "--raw", "/version").stdout)
    found = tuple(map(int, re.findall(r"\d+", version["gitVersion"])[:2]))
    assert found >= OLDEST_VERSION, f"{kubeconfig} names a cluster of {version['gitVersion']}"
    present = cluster.run("get", "namespaces", "-o", "name").stdout
    taken = [name for name in spaces if f"namespace/{name}" in present.split()]
    assert [] == taken, f"{kubeconfig} has these namespaces already: name a cluster without"
    try:
        yield cluster
    finally:
        for manifests in variants.values():
            cluster.delete(manifests)


# Each over the one before, and back to the first.
@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, "base"])
def test_an_overlay_is_applied_over_another(
    variant: str, cluster: _Cluster, variants: dict[str, list[Manifest]], server: ApplyServer
) -> None:
    applied = cluster.apply(variants[variant])
    assert (0, []) == (applied.returncode, server.refusals), applied.stderr
    known = sum(map(cluster.serves, variants[variant]))
    assert known == applied.stdout.count("serverside-applied")
    assert {"StatefulSet", "Deployment", "NetworkPolicy"} <= {
        m["kind"] for m in variants[variant] if cluster.serves(m)
    }


@pytest.mark.slow
def test_what_cannot_be_changed_is_refused(
    cluster: _Cluster, variants: dict[str, list[Manifest]]
) -> None:
    """Else the test before would say nothing."""
    (catalog,) = (m for m in variants["base"] if m["kind"] == "StatefulSet")
    moved = {**catalog, "spec": {**catalog["spec"], "serviceName": "another"}}
    refused = cluster.apply([moved])
    assert refused.returncode != 0
    assert "immutable" in refused.stderr or "Forbidden" in refused.stderr
