"""The Kubernetes API: plain objects as the server has them, errors as the domain's own."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

from kubernetes import client, config
from kubernetes.client import rest
from kubernetes.config.config_exception import ConfigException

from foretoken.domain.errors import (
    InvalidRequestError,
    NotAllowedError,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from foretoken.profiler.cluster.spec import KubernetesSpec

# An object of the API, as JSON has it.
Resource: TypeAlias = Mapping[str, Any]

_ANSWER_S_MAX = 30.0
_FIELD_MANAGER = "foretoken"
_POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LOST = (rest.urllib3.exceptions.HTTPError, OSError)

_UNAUTHORIZED, _FORBIDDEN = 401, 403
_INVALID = (400, 413, 422)
_FIRST_ERROR = 300


class ResourceExistsError(Exception):
    """There is an object of that name already."""


class ResourceVersionGoneError(Exception):
    """The server has forgotten the version a watch should begin at: list again."""


class ClusterApi:
    """The verbs that profiling needs, in one namespace."""

    def __init__(
        self, api_client: "client.ApiClient", namespace: str, options: Sequence[str] = ()
    ) -> None:
        """Keep the connection; `options` let kubectl make the same."""
        self._api_client = api_client
        self._kubectl = " ".join(("kubectl", *options, "--namespace", namespace))
        self._batch = client.BatchV1Api(api_client)
        self._core = client.CoreV1Api(api_client)
        self.namespace = namespace

    @classmethod
    def connect(cls, spec: KubernetesSpec) -> Self:
        """Return the API by a kubeconfig, or by the service account of this process's pod.

        Raises:
            InvalidRequestError: there is neither, or the kubeconfig has no such context.

        """
        try:
            if not spec.kubeconfig and not spec.context and _POD_NAMESPACE_FILE.is_file():
                configuration = client.Configuration()
                config.load_incluster_config(client_configuration=configuration)
                namespace = _POD_NAMESPACE_FILE.read_text(encoding="utf-8").strip()
                return cls(client.ApiClient(configuration), spec.namespace or namespace)
            file, context = spec.kubeconfig or None, spec.context or None
            namespace = _namespace_of_context(file, context)
            api_client = config.new_client_from_config(config_file=file, context=context)
        except (ConfigException, OSError) as err:
            raise InvalidRequestError.of_field(
                "profiler.kubernetes.kubeconfig",
                f"no way into a cluster: {err}; name a kubeconfig and its context,"
                " or run this in a pod with a service account",
            ) from err
        named = {"--kubeconfig": spec.kubeconfig, "--context": spec.context}
        options = [word for name, value in named.items() if value for word in (name, value)]
        return cls(api_client, spec.namespace or namespace, options)

    def end_command(self, job: str) -> str:
        """Return the command by which people end a Job."""
        return f"{self._kubectl} delete job {job}"

    def describe_command(self, job: str) -> str:
        """Return the command that shows people how a Job stands."""
        return f"{self._kubectl} describe job {job}"

    def close(self) -> None:
        """Free the connections."""
        self._api_client.close()

    def find_job(self, name: str) -> tuple[Resource | None, str]:
        """Return the Job of that name, if there is one, and the version to watch it from.

        That is the version of the whole namespace now: the Job's own may be so old that the server
        has forgotten it.
        """
        listed = self._call(
            "list jobs",
            self._batch.list_namespaced_job,
            self.namespace,
            field_selector=f"metadata.name={name}",
        )
        version = str(listed["metadata"]["resourceVersion"])
        return next(iter(listed.get("items") or ()), None), version

    def create_job(self, body: Resource) -> Resource:
        """Create a Job.

        Raises:
            ResourceExistsError: there is one of that name.

        """
        return self._create(self._batch.create_namespaced_job, body)

    def delete_job(self, job: Resource) -> None:
        """Delete this very Job once its pods are gone; harmless where it is gone itself."""
        metadata = job["metadata"]
        options = {
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": metadata["uid"]},
        }
        # Another one of its name is a conflict.
        with suppress(_AbsentError, ResourceExistsError):
            self._call(
                "delete jobs",
                self._batch.delete_namespaced_job,
                metadata["name"],
                self.namespace,
                body=options,
            )

    def change_job(self, job: Resource, change: Resource) -> None:
        """Merge a change into a Job; harmless where it is gone."""
        patch = self._batch.patch_namespaced_job
        with suppress(_AbsentError):
            self._call(
                "patch jobs",
                patch,
                job["metadata"]["name"],
                self.namespace,
                change,
                **_merging(patch),
            )

    def create(self, body: Resource) -> None:
        """Create a ConfigMap, Secret or Service.

        Raises:
            ResourceExistsError: there is one of that name.

        """
        create = {
            "ConfigMap": self._core.create_namespaced_config_map,
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
        }[body["kind"]]
        self._create(create, body)

    def list_pods(self, selector: str) -> list[Resource]:
        """Return the pods with these labels."""
        listed = self._call(
            "list pods", self._core.list_namespaced_pod, self.namespace, label_selector=selector
        )
        return list(listed.get("items") or ())

    def list_warnings(self) -> list[Resource]:
        """Return what the cluster complained of lately in this namespace, oldest first.

        Without the right to see it, nothing.
        """
        try:
            listed = self._call(
                "list events",
                self._core.list_namespaced_event,
                self.namespace,
                field_selector="type=Warning",
            )
        except NotAllowedError:
            return []
        return sorted(listed.get("items") or (), key=_time_of_event)

    def list_nodes(self) -> list[Resource]:
        """Return all nodes."""
        return list(self._call("list nodes", self._core.list_node).get("items") or ())

    def read_log(self, pod: str, container: str, num_lines: int) -> str:
        """Return the last lines that a container wrote, nothing where there are none any more."""
        try:
            answer = self._request(
                "get pods/log",
                self._core.read_namespaced_pod_log,
                pod,
                self.namespace,
                container=container,
                tail_lines=num_lines,
            )
        except (_AbsentError, InvalidRequestError):
            # Gone, or not started.
            return ""
        return answer.decode("utf-8", errors="replace")

    def watch_job(self, name: str, resource_version: str, timeout_s: int) -> Iterator[Resource]:
        """Yield the events of a Job after a version of it, for at most `timeout_s`.

        Raises:
            ResourceVersionGoneError: that version is too old.

        """
        answer = self._open(
            "watch jobs",
            self._batch.list_namespaced_job,
            self.namespace,
            field_selector=f"metadata.name={name}",
            resource_version=resource_version,
            allow_watch_bookmarks=True,
            timeout_seconds=timeout_s,
            watch=True,
            _request_timeout=(_ANSWER_S_MAX, timeout_s + _ANSWER_S_MAX),
        )
        try:
            for line in _lines(answer):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise _error_of("watch jobs", int(status.get("code", 0)), status)
                yield event
        except _LOST as err:
            raise _lost(err) from err
        finally:
            answer.close()
            answer.release_conn()

    def _create(self, create: Callable[..., Any], body: Resource) -> Resource:
        what = f"create {body['kind'].lower()}s"
        try:
            created: Resource = self._call(
                what,
                create,
                self.namespace,
                body,
                field_manager=_FIELD_MANAGER,
                field_validation="Strict",
            )
        except _AbsentError as err:
            # Lists of a namespace that does not exist are empty; only what is created tells.
            raise InvalidRequestError.of_field(
                "profiler.kubernetes.namespace", f"the cluster refuses to {what}: {err}"
            ) from err
        return created

    def _call(self, what: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return json.loads(self._request(what, method, *arguments, **options))

    def _request(
        self, what: str, method: Callable[..., Any], *arguments: Any, **options: Any
    ) -> bytes:
        answer = self._open(what, method, *arguments, _request_timeout=_ANSWER_S_MAX, **options)
        try:
            return bytes(answer.data)
        except _LOST as err:
            raise _lost(err) from err

    def _open(self, what: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the raw answer: the server's JSON, whatever this client's models know of it."""
        try:
            answer = method(*arguments, **options, _preload_content=False)
        except client.ApiException as err:
            raise _error_of(what, err.status or 0, _status_of(err.body, err.reason)) from err
        except _LOST as err:
            raise _lost(err) from err
        if answer.status >= _FIRST_ERROR:
            raise _error_of(what, answer.status, _status_of(answer.data, answer.reason))
        return answer


class _AbsentError(Exception):
    """There is no object of that name."""


_INTERNAL: Mapping[int, type[Exception]] = {
    404: _AbsentError,
    409: ResourceExistsError,
    410: ResourceVersionGoneError,
}


def _error_of(what: str, code: int, status: Mapping[str, Any]) -> Exception:
    message = status.get("message") or status.get("reason") or f"status {code}"
    if code == _UNAUTHORIZED:
        return UnauthenticatedError(
            f"the cluster does not know the caller ({message}); renew the kubeconfig's credentials"
        )
    if code == _FORBIDDEN:
        return NotAllowedError(
            f"may not {what}: {message}; deploy/k8s/components/profiler-controller has the Role",
            verb=what,
        )
    if code in _INTERNAL:
        return _INTERNAL[code](message)
    if code in _INVALID:
        return InvalidRequestError(f"the cluster refuses to {what}: {message}")
    return ServiceUnavailableError(f"the cluster's API server: {message}; try again")


def _time_of_event(event: Resource) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _status_of(body: bytes | str | None, reason: str | None) -> Mapping[str, Any]:
    try:
        status = json.loads(body or "")
    except ValueError:
        return {"message": reason or ""}
    return status if isinstance(status, dict) else {"message": str(status)}


def _merging(patch: Callable[..., Any]) -> Mapping[str, str]:
    """Return what says that a patch is to be merged.

    Newer clients take every patch for a list of changes unless configured; older ones cannot be
    configured, and look.
    """
    is_told = "_content_type" in inspect.signature(patch).parameters
    return {"_content_type": "application/merge-patch+json"} if is_told else {}


def _lost(err: Exception) -> ServiceUnavailableError:
    # What urllib3 says of its last try, without how often it tried and what for.
    why = getattr(err, "reason", None) or err
    return ServiceUnavailableError(f"the cluster's API server cannot be reached: {why}")


def _lines(answer: Any) -> Iterator[bytes]:
    rest_of_line = b""
    for piece in answer.stream(amt=None, decode_content=False):
        *lines, rest_of_line = (rest_of_line + piece).split(b"\n")
        yield from (line for line in lines if line.strip())


def _namespace_of_context(file: str | None, context: str | None) -> str:
    contexts, active = config.list_kube_config_contexts(config_file=file)
    chosen = next((c for c in contexts if c["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")
