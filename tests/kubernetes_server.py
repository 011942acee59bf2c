"""An API server for tests: Kubernetes' verbs, watches and rights, objects by its schemas."""

import base64
import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import kubernetes_validate
import yaml
from kubernetes_rules import check_rules, expect

VERSION = "1.36"
NAMESPACE = "foretoken"
TOKEN = "of-the-tests"  # noqa: S105 - of nothing

Resource = dict[str, Any]
Key = tuple[str, str]

_KINDS = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "configmaps": ("v1", "ConfigMap"),
    "secrets": ("v1", "Secret"),
    "nodes": ("v1", "Node"),
    "events": ("v1", "Event"),
}
_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>log))?$"
)
_VERB_OF_METHOD = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


class RefusedError(Exception):
    """A request is answered with this status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


class ObjectStore:
    """Objects with their versions, and all changes to them in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[Key, Resource] = {}
        self.history: list[tuple[int, str, Key, Resource]] = []
        self.version = 1
        self.oldest_version = 0
        # Raised by 1 to end all watches at once, as a server that restarts does.
        self.watch_round = 0
        self.refusals: list[str] = []

    def create(self, plural: str, body: Resource) -> Resource:
        with self.changed:
            key = (plural, body.get("metadata", {}).get("name", ""))
            if key in self.objects:
                raise RefusedError(409, "AlreadyExists", f'{plural} "{key[1]}" already exists')
            body = copy.deepcopy(body)
            body["metadata"] |= {
                "namespace": NAMESPACE,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            if plural == "nodes":
                del body["metadata"]["namespace"]
            self._check(plural, body)
            return self._put("ADDED", key, body)

    def change(self, plural: str, name: str, patch: Mapping[str, Any]) -> Resource:
        """Merge a patch into an object; what stays the same is no change."""
        with self.changed:
            before = self.get(plural, name)
            body = _merge(before, patch)
            if body == before:
                return before
            self._check(plural, body)
            return self._put("MODIFIED", (plural, name), body)

    def delete(self, plural: str, name: str) -> Resource:
        """Remove an object, and what it owns."""
        with self.changed:
            body = self.get(plural, name)
            self._put("DELETED", (plural, name), body)
            del self.objects[plural, name]
            for key, other in list(self.objects.items()):
                owners = other["metadata"].get("ownerReferences", ())
                if body["metadata"]["uid"] in {owner["uid"] for owner in owners}:
                    self.delete(*key)
            return body

    def get(self, plural: str, name: str) -> Resource:
        with self.changed:
            if (plural, name) not in self.objects:
                raise RefusedError(404, "NotFound", f'{plural} "{name}" not found')
            return copy.deepcopy(self.objects[plural, name])

    def list(self, plural: str, is_chosen: Callable[[Resource], bool]) -> list[Resource]:
        with self.changed:
            every = [body for (kind, _), body in self.objects.items() if kind == plural]
            return [copy.deepcopy(body) for body in every if is_chosen(body)]

    def expire(self) -> None:
        """Forget all changes so far: watches from before are Gone."""
        with self.changed:
            self.version += 1
            self.oldest_version = self.version
            self.watch_round += 1
            self.changed.notify_all()

    def drop_watches(self) -> None:
        """End all watches in the middle of what they send."""
        with self.changed:
            self.watch_round += 1
            self.changed.notify_all()

    def _put(self, event: str, key: Key, body: Resource) -> Resource:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = body
        self.history.append((self.version, event, key, copy.deepcopy(body)))
        self.changed.notify_all()
        return copy.deepcopy(body)

    def _check(self, plural: str, body: Resource) -> None:
        """Refuse what the schemas, or the rules that go with them, do not allow."""
        version, kind = _KINDS[plural]
        try:
            given = (body.get("apiVersion"), body.get("kind"))
            expect((version, kind) == given, f"{plural} want {version} {kind}")
            kubernetes_validate.validate(body, VERSION, strict=True)
            check_rules(body)
        except (kubernetes_validate.ValidationError, ValueError) as err:
            self.refusals.append(str(err))
            raise RefusedError(422, "Invalid", str(err)) from err


class KubernetesServer:
    """Serves a store over HTTP; a context manager.

    `rules` are those of a Role: what they do not grant is forbidden. None grants everything.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.store = ObjectStore()
        self.rules = rules
        self.logs: dict[str, Path] = {}
        # (verb, plural) of every request, in order.
        self.requests: list[tuple[str, str]] = []
        self.num_outages = 0
        # So many requests are answered as by a server that does not know its callers yet.
        self.num_unknown = 0
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.drop_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig with one context, `tests`, for this server."""
        host, port = self._server.server_address[:2]
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": {"server": f"http://{host!s}:{port}"}}],
            "users": [{"name": "tests", "user": {"token": TOKEN}}],
            "contexts": [
                {
                    "name": "tests",
                    "context": {"cluster": "tests", "user": "tests", "namespace": NAMESPACE},
                }
            ],
            "current-context": "tests",
        }
        path = folder / "kubeconfig.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def add_node(self, name: str, product: str = "", num_gpus: int = 0) -> None:
        """Add a node, with GPUs of a product and their taint if it has any."""
        labels = {"kubernetes.io/hostname": name}
        node: Resource = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        if product:
            labels["nvidia.com/gpu.product"] = product
            node["spec"] = {
                "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
            }
        node["metadata"]["labels"] = labels
        gpus = {"nvidia.com/gpu": str(num_gpus)} if num_gpus else {}
        node["status"] = {"allocatable": {"cpu": "64", "memory": "256Gi", **gpus}}
        self.store.create("nodes", node)

    def warn(self, plural: str, name: str, reason: str, message: str) -> None:
        """Complain of an object, as controllers and kubelets do."""
        uid, kind = self.store.get(plural, name)["metadata"]["uid"], _KINDS[plural][1]
        self.store.create(
            "events",
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{name}.{uuid.uuid4().hex[:16]}"},
                "involvedObject": {"kind": kind, "name": name, "namespace": NAMESPACE, "uid": uid},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )

    def check_right(self, verb: str, plural: str, part: str) -> None:
        """Refuse what the rules do not grant."""
        resource = f"{plural}/{part}" if part else plural
        self.requests.append((verb, resource))
        if self.num_unknown:
            self.num_unknown -= 1
            code, reason = ((401, "Unauthorized"), (403, "Forbidden"))[self.num_unknown % 2]
            raise RefusedError(code, reason, f"{reason}: no policies are loaded yet")
        if self.num_outages:
            self.num_outages -= 1
            raise RefusedError(503, "ServiceUnavailable", "the server is away")
        for rule in self.rules if self.rules is not None else [{"verbs": [verb]}]:
            if verb in rule["verbs"] and resource in rule.get("resources", [resource]):
                return
        raise RefusedError(403, "Forbidden", f"{resource} is forbidden: may not {verb}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubernetesServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "{}")
        try:
            answer = self._act(method, body)
        except RefusedError as refusal:
            self._send(refusal.code, refusal.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        else:
            if answer is not None:
                self._send(201 if method == "POST" else 200, answer)

    def _act(self, method: str, body: Resource) -> Resource | str | None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "Unauthorized", "Unauthorized")
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        found = _PATH.fullmatch(unquote(url.path))
        if found is None or found["plural"] not in _KINDS:
            raise RefusedError(404, "NotFound", f"the server could not find {url.path}")
        plural, name, part = found["plural"], found["name"] or "", found["part"] or ""
        if plural != "nodes" and found["namespace"] != NAMESPACE:
            if self.api.rules is not None:
                raise RefusedError(403, "Forbidden", f"may not see namespace {found['namespace']}")
            if method == "GET":
                # Nothing is in a namespace that does not exist.
                return {"metadata": {"resourceVersion": str(self.api.store.version)}, "items": None}
            raise RefusedError(404, "NotFound", f'namespaces "{found["namespace"]}" not found')
        is_watch = query.get("watch") in ("true", "True")
        reading = "get" if name else "watch" if is_watch else "list"
        self.api.check_right(_VERB_OF_METHOD.get(method, reading), plural, part)
        if method != "GET":
            return self._write(method, (plural, name), body, query)
        if part:
            return self._read_log(name, query)
        if is_watch:
            self._watch(plural, _selector(query), query)
            return None
        return self.api.store.get(plural, name) if name else self._list(plural, query)

    def _write(self, method: str, key: Key, body: Resource, query: Mapping[str, str]) -> Resource:
        store = self.api.store
        if method == "POST":
            return store.create(key[0], _decoded(body))
        if method == "PATCH":
            kind = self.headers.get("Content-Type", "")
            if "merge-patch" not in kind:
                raise RefusedError(415, "UnsupportedMediaType", f"no patch of an object: {kind}")
            return store.change(*key, _decoded(body))
        return self._delete(*key, {**query, **body})

    def _list(self, plural: str, query: Mapping[str, str]) -> Resource:
        version, kind = _KINDS[plural]
        store = self.api.store
        with store.changed:
            return {
                "apiVersion": version,
                "kind": f"{kind}List",
                "metadata": {"resourceVersion": str(store.version)},
                "items": store.list(plural, _selector(query)),
            }

    def _delete(self, plural: str, name: str, options: Mapping[str, Any]) -> Resource:
        store = self.api.store
        wanted = options.get("preconditions", {}).get("uid")
        if wanted not in (None, store.get(plural, name)["metadata"]["uid"]):
            raise RefusedError(409, "Conflict", "the UID in the precondition does not match")
        if plural == "jobs" and options.get("propagationPolicy") == "Foreground":
            # The controller removes it once its pods are gone.
            patch = {
                "deletionTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "finalizers": ["foregroundDeletion"],
            }
            return store.change(plural, name, {"metadata": patch})
        return store.delete(plural, name)

    def _read_log(self, pod: str, query: Mapping[str, str]) -> str:
        self.api.store.get("pods", pod)
        path = self.api.logs.get(pod)
        if path is None:
            raise RefusedError(400, "BadRequest", f'container in pod "{pod}" is waiting to start')
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join(lines[-int(query.get("tailLines", len(lines) or 1)) :])

    def _watch(
        self, plural: str, is_chosen: Callable[[Resource], bool], query: Mapping[str, str]
    ) -> None:
        store = self.api.store
        version = int(query.get("resourceVersion") or 0)
        end_s = time.monotonic() + float(query.get("timeoutSeconds", 60))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with store.changed:
            watch_round = store.watch_round
            is_gone = version < store.oldest_version
        if is_gone:
            gone = RefusedError(410, "Expired", f"too old resource version: {version}").status
            self._send_event("ERROR", gone)
            self._send_chunk(b"")
            return
        while time.monotonic() < end_s:
            with store.changed:
                if store.version <= version and store.watch_round == watch_round:
                    store.changed.wait(0.5)
                if store.watch_round != watch_round:
                    # No last chunk: the connection breaks.
                    self.close_connection = True
                    return
                events = [event for event in store.history if event[0] > version]
                version = max(version, store.version)
            for _, kind, (changed, _), body in events:
                if changed == plural and is_chosen(body):
                    self._send_event(kind, body)
            self._send_event("BOOKMARK", _bookmark(plural, version))
        self._send_chunk(b"")

    def _send_event(self, kind: str, body: Resource) -> None:
        self._send_chunk(json.dumps({"type": kind, "object": body}).encode() + b"\n")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, code: int, answer: Resource | str) -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _bookmark(plural: str, version: int) -> Resource:
    api_version, kind = _KINDS[plural]
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
    }


def _selector(query: Mapping[str, str]) -> Callable[[Resource], bool]:
    wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
    fields = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part)

    def is_chosen(body: Resource) -> bool:
        labels = body["metadata"].get("labels", {})
        known = {"metadata.name": body["metadata"]["name"], "type": body.get("type")}
        return wanted.items() <= labels.items() and fields.items() <= known.items()

    return is_chosen


def _decoded(body: Resource) -> Resource:
    """Check that a Secret's values are base64, as a server does."""
    for value in body.get("data", {}).values() if body.get("kind") == "Secret" else ():
        base64.b64decode(value, validate=True)
    return body


def _merge(before: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping) or not isinstance(before, Mapping):
        return copy.deepcopy(patch)
    merged = dict(copy.deepcopy(before))
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(before.get(key, {}), value)
    return merged
