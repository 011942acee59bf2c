"""An API server for tests that takes what `kubectl apply --server-side` sends, and keeps it.

It knows the kinds that manifests here are made of, refuses what their schemas and rules do not
allow, and changes of what cannot be changed. A whole one is `KubernetesServer`, of fewer kinds.
"""

import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

import kubernetes_validate
import yaml
from kubernetes_custom import check_custom
from kubernetes_manifests import fixed_of
from kubernetes_rules import check_rules, expect

VERSION = "1.36"
Resource = dict[str, Any]

_NAMESPACED, _OF_CLUSTER = True, False
# By group and version: the plural and whether it lies in a namespace, by kind.
_KINDS: Mapping[str, Mapping[str, tuple[str, bool]]] = {
    "v1": {
        "ConfigMap": ("configmaps", _NAMESPACED),
        "Namespace": ("namespaces", _OF_CLUSTER),
        "PersistentVolumeClaim": ("persistentvolumeclaims", _NAMESPACED),
        "Secret": ("secrets", _NAMESPACED),
        "Service": ("services", _NAMESPACED),
        "ServiceAccount": ("serviceaccounts", _NAMESPACED),
    },
    "apps/v1": {
        "Deployment": ("deployments", _NAMESPACED),
        "StatefulSet": ("statefulsets", _NAMESPACED),
    },
    "autoscaling/v2": {"HorizontalPodAutoscaler": ("horizontalpodautoscalers", _NAMESPACED)},
    "batch/v1": {"CronJob": ("cronjobs", _NAMESPACED)},
    "networking.k8s.io/v1": {
        "Ingress": ("ingresses", _NAMESPACED),
        "NetworkPolicy": ("networkpolicies", _NAMESPACED),
    },
    "ray.io/v1": {"RayCluster": ("rayclusters", _NAMESPACED)},
    "policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", _NAMESPACED)},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": ("clusterroles", _OF_CLUSTER),
        "ClusterRoleBinding": ("clusterrolebindings", _OF_CLUSTER),
        "Role": ("roles", _NAMESPACED),
        "RoleBinding": ("rolebindings", _NAMESPACED),
    },
}
_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>v1|[a-z0-9.]+/v\d)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)/(?P<name>[^/]+)"
)


class ApplyServer:
    """Serves what it was given; a context manager. `refusals` are the reasons of all refusals."""

    def __init__(self) -> None:
        self.objects: dict[str, Resource] = {}
        self.refusals: list[str] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        """Where it is served."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def apply(self, path: str, body: Resource) -> tuple[int, Resource]:
        """Keep an object whole, and return the status with it or with the reason why not."""
        try:
            if not check_custom(body, VERSION):
                kubernetes_validate.validate(body, VERSION, strict=True)
            check_rules(body)
            before = self.objects.get(path, body)
            expect(fixed_of(before) == fixed_of(body), f"{path}: field is immutable")
        except (kubernetes_validate.ValidationError, ValueError) as err:
            self.refusals.append(str(err))
            return 422, _status(422, "Invalid", str(err))
        is_new = path not in self.objects
        self.objects[path] = body
        return (201 if is_new else 200), body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApplyServer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        with self.api.lock:
            found = _discover(path) or self.api.objects.get(path)
        if found is None:
            self._send(404, _status(404, "NotFound", f"{path} not found"))
        else:
            self._send(200, found)

    def do_PATCH(self) -> None:
        body = yaml.safe_load(self.rfile.read(int(self.headers["Content-Length"])))
        path = urlsplit(self.path).path
        found = _PATH.fullmatch(path)
        kinds = _KINDS.get(found["version"], {}) if found else {}
        kind = (found["plural"], bool(found["namespace"])) if found else None
        with self.api.lock:
            if found is None or kind != kinds.get(body["kind"]):
                self._send(404, _status(404, "NotFound", f"{path} not found"))
            elif "apply-patch" not in self.headers["Content-Type"]:
                self._send(415, _status(415, "UnsupportedMediaType", "only server-side apply"))
            elif not self._has_namespace(found["namespace"]):
                message = f'namespaces "{found["namespace"]}" not found'
                self._send(404, _status(404, "NotFound", message))
            else:
                self._send(*self.api.apply(path, body))

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def _has_namespace(self, name: str | None) -> bool:
        return name is None or f"/api/v1/namespaces/{name}" in self.api.objects

    def _send(self, code: int, body: Resource) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _discover(path: str) -> Resource | None:
    """Return what a server says of itself: which groups there are, and what is in them."""
    if path == "/version":
        major, minor = VERSION.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [version.split("/") for version in _KINDS if "/" in version]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": name,
                    "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version},
                }
                for name, version in groups
            ],
        }
    version = re.sub(r"^/apis?/", "", path)
    if version not in _KINDS or (path.startswith("/api/") != (version == "v1")):
        return None
    return {
        "kind": "APIResourceList",
        "groupVersion": version,
        "resources": [
            {
                "name": plural,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": is_namespaced,
                "verbs": ["get", "patch"],
            }
            for kind, (plural, is_namespaced) in _KINDS[version].items()
        ],
    }


def _status(code: int, reason: str, message: str) -> Resource:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }
