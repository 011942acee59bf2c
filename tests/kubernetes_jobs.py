"""A Job controller, scheduler and kubelet for tests: every index is a process on this machine."""

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kubernetes_server import KubernetesServer, Resource

INDEX_KEY = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"
_TICK_S = 0.05
_GRACE_S = 10.0
_KILLED = 128 + signal.SIGKILL
# Mounts that stay what they are: every process has the machine's own.
_REAL_FOLDERS = ("/tmp", "/dev/shm")  # noqa: S108


@dataclass(kw_only=True)
class _Index:
    """What became of one index of a Job."""

    num_failed: int = 0
    is_succeeded: bool = False
    is_failed: bool = False
    not_before_s: float = 0.0


@dataclass(kw_only=True)
class _State:
    """What the controller remembers of a Job."""

    indexes: dict[int, _Index]
    finished_s: float = 0.0
    num_started: int = 0
    disrupted: set[str] = field(default_factory=set)


class JobController:
    """Starts the pods of Jobs as processes in folders; a context manager.

    A mount of a ConfigMap, a Secret or an emptyDir is a folder of the pod; the paths inside pods
    are put right in commands, variables and files. `program` is run for `foretoken`.
    """

    def __init__(
        self,
        server: KubernetesServer,
        folder: Path,
        *,
        program: Sequence[str] = (sys.executable, "-m", "foretoken.app"),
        retry_s: float = 0.2,
    ) -> None:
        self._program = program
        self._store = server.store
        self._server = server
        self._folder = folder
        self._retry_s = retry_s
        self._states: dict[str, _State] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None
        # Answers a pod's start in the place of a process: the status of its containers.
        self.refuse_start: Callable[[Resource], Mapping[str, Any] | None] = lambda _: None
        # Why no pod of any Job is made, as a quota or an admission says it.
        self.refuses_pods = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for process in self._processes.values():
            process.kill()
            process.wait()
        if self.error is not None:
            raise self.error

    def running(self) -> dict[int, str]:
        """Return the pods whose processes run, by index."""
        with self._store.changed:
            names = [name for name, process in self._processes.items() if _runs(process)]
            return {_index_of(self._store.get("pods", name)): name for name in names}

    def num_started(self, job: str) -> int:
        """Return how many pods a Job has had."""
        return self._states[job].num_started

    def run_instead(self, program: Sequence[str]) -> None:
        """Run another program in pods that start from now on."""
        self._program = program

    def kill(self, pod: str, *, is_disruption: bool = False) -> None:
        """Kill a pod's process with -9; a disruption is a node taken away, with all it had."""
        if is_disruption:
            self._states[self._store.get("pods", pod)["metadata"]["labels"][JOB_LABEL]]\
                .disrupted.add(pod)  # fmt: skip
        self._processes[pod].kill()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(_TICK_S):
                with self._store.changed:
                    for job in self._store.list("jobs", lambda _: True):
                        self._reconcile(job)
        except BaseException as err:  # noqa: BLE001 - the test that uses this must fail
            self.error = err
            # Whoever follows a Job learns that it is over.
            for job in self._store.list("jobs", lambda _: True):
                self._store.delete("jobs", job["metadata"]["name"])

    def _reconcile(self, job: Resource) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        state = self._states.get(name)
        if state is None:
            indexes = {index: _Index() for index in range(spec["completions"])}
            state = self._states[name] = _State(indexes=indexes)
        if job["metadata"].get("deletionTimestamp"):
            self._remove(name)
            return
        if state.finished_s:
            if time.monotonic() - state.finished_s >= spec.get("ttlSecondsAfterFinished", 1e9):
                self._remove(name)
            return
        settled = [self._settle(job, state, pod) for pod in self._pods(name)]
        is_failing = any(settled)
        if spec.get("suspend"):
            self._end_pods(name)
        elif not is_failing:
            self._start_pods(job, state)
        self._report(job, state, is_failing=is_failing)

    def _settle(self, job: Resource, state: _State, pod: Resource) -> bool:
        """Take note of a pod that ended, and return whether that fails the Job."""
        name, index = pod["metadata"]["name"], state.indexes[_index_of(pod)]
        process = self._processes.get(name)
        if process is None or _runs(process):
            return False
        del self._processes[name]
        code = process.returncode if process.returncode >= 0 else _KILLED
        status: Resource = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [_container_status(pod, "terminated", {"exitCode": code})],
        }
        is_disruption = name in state.disrupted
        if is_disruption:
            status["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
        self._store.change("pods", name, {"status": status})
        index.is_succeeded = not code
        index.not_before_s = time.monotonic() + self._retry_s
        rules = job["spec"].get("podFailurePolicy", {}).get("rules", ())
        if not code or (is_disruption and _rule(rules, "Ignore")):
            return False
        failing = _rule(rules, "FailJob")
        if failing and code in failing["onExitCodes"]["values"]:
            return True
        index.num_failed += 1
        index.is_failed = index.num_failed > job["spec"]["backoffLimitPerIndex"]
        num_failed = sum(entry.is_failed for entry in state.indexes.values())
        return num_failed > job["spec"].get("maxFailedIndexes", len(state.indexes))

    def _start_pods(self, job: Resource, state: _State) -> None:
        name = job["metadata"]["name"]
        active = {_index_of(pod) for pod in self._pods(name) if not _is_over(pod)}
        for number, index in state.indexes.items():
            is_due = time.monotonic() >= index.not_before_s
            is_open = not (index.is_succeeded or index.is_failed or number in active)
            if is_open and is_due and self.refuses_pods:
                index.not_before_s = time.monotonic() + self._retry_s
                pod = f"{name}-{number}-{uuid.uuid4().hex[:5]}"
                why = f'Error creating: pods "{pod}" is forbidden: {self.refuses_pods}'
                self._server.warn("jobs", name, "FailedCreate", why)
            elif is_open and is_due and len(active) < job["spec"]["parallelism"]:
                active.add(number)
                state.num_started += 1
                self._create_pod(job, number)
        for pod in self._pods(name):
            if pod["metadata"]["name"] not in self._processes and not _is_over(pod):
                self._start(pod)

    def _create_pod(self, job: Resource, number: int) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        mark = {INDEX_KEY: str(number)}
        labels = {**template["metadata"]["labels"], **mark, JOB_LABEL: name}
        metadata = {
            "name": f"{name}-{number}-{uuid.uuid4().hex[:5]}",
            "labels": labels,
            "annotations": {**template["metadata"].get("annotations", {}), **mark},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": name,
                    "uid": job["metadata"]["uid"],
                    "controller": True,
                }
            ],
        }
        spec = {**template["spec"], "hostname": f"{name}-{number}"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": spec,
            "status": {"phase": "Pending"},
        }
        self._store.create("pods", pod)

    def _start(self, pod: Resource) -> None:
        """Bind a pod to a node and start it, or say why not."""
        name = pod["metadata"]["name"]
        nodes = self._store.list("nodes", lambda node: _fits(pod["spec"], node))
        if not nodes:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0 nodes are available: none match the pod's node affinity/selector.",
            }
            self._store.change("pods", name, {"status": {"conditions": [condition]}})
            return
        refused = self.refuse_start(pod)
        if refused is not None:
            status = _container_status(pod, "waiting", refused)
            self._store.change("pods", name, {"status": {"containerStatuses": [status]}})
            return
        self._processes[name] = self._start_process(pod)
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        place = {"nodeName": nodes[0]["metadata"]["name"]}
        self._store.change("pods", name, {"spec": place, "status": status})

    def _start_process(self, pod: Resource) -> "subprocess.Popen[bytes]":
        spec, name = pod["spec"], pod["metadata"]["name"]
        (container,) = spec["containers"]
        folder = self._folder / name
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        paths = {
            mount["mountPath"]: folder / mount["name"]
            for mount in container.get("volumeMounts", ())
            if mount["mountPath"] not in _REAL_FOLDERS
        }
        translate = _translator({path: str(real) for path, real in paths.items()}, spec)
        for mount in container.get("volumeMounts", ()):
            real = folder / mount["name"]
            real.mkdir(parents=True)
            for file, content in self._files(volumes[mount["name"]]).items():
                (real / file).write_text(translate(content), encoding="utf-8")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            **{entry["name"]: translate(_value(entry, pod)) for entry in container["env"]},
        }
        program, *arguments = container["command"]
        command = self._program if program == "foretoken" else [program]
        log = folder / "log"
        self._server.logs[name] = log
        with log.open("wb") as output:
            return subprocess.Popen(
                [*command, *map(translate, arguments)],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _files(self, volume: Resource) -> Mapping[str, str]:
        """Return what a volume of a ConfigMap or Secret holds, by file."""
        if "configMap" in volume:
            data: Mapping[str, str] = self._store.get("configmaps", volume["configMap"]["name"])[
                "data"
            ]
            return data
        if "secret" in volume:
            stored = self._store.get("secrets", volume["secret"]["secretName"])
            items = volume["secret"]["items"]
            return {i["path"]: base64.b64decode(stored["data"][i["key"]]).decode() for i in items}
        return {}

    def _report(self, job: Resource, state: _State, *, is_failing: bool) -> None:
        name, indexes = job["metadata"]["name"], state.indexes
        active = [pod for pod in self._pods(name) if not _is_over(pod)]
        failed = [number for number, index in indexes.items() if index.is_failed]
        is_over = is_failing or all(i.is_succeeded or i.is_failed for i in indexes.values())
        status: Resource = {
            "active": len(active),
            "ready": sum(_is_ready(pod) for pod in active),
            "succeeded": sum(index.is_succeeded for index in indexes.values()),
            "failed": sum(index.num_failed for index in indexes.values()) + int(is_failing),
            "failedIndexes": ",".join(map(str, failed)),
        }
        if is_over:
            state.finished_s = time.monotonic()
            self._end_pods(name)
            ending = ("FailureTarget", "Failed") if failed or is_failing else (
                "SuccessCriteriaMet", "Complete")  # fmt: skip
            reason = "PodFailurePolicy" if is_failing and not failed else "FailedIndexes"
            why = {"reason": reason, "message": "Job has failed indexes"} if failed else {}
            status |= {
                "active": 0,
                "ready": 0,
                "conditions": [{"type": kind, "status": "True", **why} for kind in ending],
            }
        self._store.change("jobs", name, {"status": status})

    def _remove(self, job: str) -> None:
        self._end_pods(job)
        self._store.delete("jobs", job)
        del self._states[job]

    def _end_pods(self, job: str) -> None:
        """End pods as a kubelet does: SIGTERM, a time to finish, SIGKILL."""
        for pod in self._pods(job):
            process = self._processes.pop(pod["metadata"]["name"], None)
            if process is None or not _runs(process):
                continue
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._store.delete("pods", pod["metadata"]["name"])

    def _pods(self, job: str) -> list[Resource]:
        return self._store.list("pods", lambda pod: pod["metadata"]["labels"][JOB_LABEL] == job)


def _translator(paths: Mapping[str, str], spec: Resource) -> Callable[[str], str]:
    """Return what puts the names inside a pod right: its folders, and its peers' host names."""
    names = dict(paths)
    if "subdomain" in spec:
        first = f"{spec['hostname'].rpartition('-')[0]}-0.{spec['subdomain']}"
        names[first] = "127.0.0.1"
    # The longest first: a folder's name may begin like another's.
    pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return lambda text: re.sub(pattern, lambda found: names[found[0]], text)


def _value(entry: Mapping[str, Any], pod: Resource) -> str:
    if "value" in entry:
        return str(entry["value"])
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    annotation = path.removeprefix("metadata.annotations['").removesuffix("']")
    return str(pod["metadata"]["annotations"][annotation])


def _fits(spec: Resource, node: Resource) -> bool:
    """Return whether a node has the labels, taints and GPUs for a pod."""
    labels = node["metadata"].get("labels", {})
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", [{}])
    is_chosen = any(
        all(labels.get(e["key"]) in e["values"] for e in term.get("matchExpressions", ()))
        for term in terms
    )
    tolerated = {toleration.get("key") for toleration in spec.get("tolerations", ())}
    taints = {taint["key"] for taint in node.get("spec", {}).get("taints", ())}
    limits = spec["containers"][0]["resources"]["limits"]
    offered = int(node["status"]["allocatable"].get("nvidia.com/gpu", 0))
    return (
        is_chosen
        and spec.get("nodeSelector", {}).items() <= labels.items()
        and taints <= tolerated
        and int(limits.get("nvidia.com/gpu", 0)) <= offered
    )


def _container_status(pod: Resource, state: str, detail: Mapping[str, Any]) -> Resource:
    (container,) = pod["spec"]["containers"]
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {state: dict(detail)},
    }


def _rule(rules: Any, action: str) -> Any:
    return next((rule for rule in rules if rule["action"] == action), None)


def _runs(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is None


def _index_of(pod: Resource) -> int:
    return int(pod["metadata"]["annotations"][INDEX_KEY])


def _is_over(pod: Resource) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _is_ready(pod: Resource) -> bool:
    return bool(pod["status"]["phase"] == "Running")
