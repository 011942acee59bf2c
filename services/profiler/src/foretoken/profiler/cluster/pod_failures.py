"""What keeps pods from working, in words that say what to do."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from foretoken.profiler.cluster.api import Resource
from foretoken.profiler.cluster.objects import INDEX_KEY

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_LONGEST_MESSAGE = 300


def find_pod_failures(pods: Iterable[Resource]) -> list[str]:
    """Return what is wrong with pods, one sentence for each kind of failure."""
    shards_by_failure: dict[str, list[int]] = {}
    for pod in sorted(pods, key=index_of_pod):
        for failure in _failures_of(pod):
            shards_by_failure.setdefault(failure, []).append(index_of_pod(pod))
    return [
        f"{'shard' if len(shards) == 1 else 'shards'} {', '.join(map(str, shards))} {failure}"
        for failure, shards in shards_by_failure.items()
    ]


def index_of_pod(pod: Resource) -> int:
    """Return the completion index of a pod, -1 where it has none."""
    metadata = pod["metadata"]
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return int(marks.get(INDEX_KEY, -1))


def ending_of_pod(pod: Resource) -> str:
    """Return how a pod that failed ended."""
    status = pod.get("status") or {}
    if status.get("reason"):
        return _sentence(f"was stopped: {status['reason']}", status.get("message"))
    for container in status.get("containerStatuses") or ():
        terminated = _state(container, "terminated")
        if terminated:
            if terminated.get("reason") == "OOMKilled":
                return _OUT_OF_MEMORY
            return f"ended with status {terminated.get('exitCode', '?')}"
    return "failed"


_OUT_OF_MEMORY = "ran out of memory: raise profiler.kubernetes.memory_limit"


def _failures_of(pod: Resource) -> Iterator[str]:
    status = pod.get("status") or {}
    phase = status.get("phase")
    if phase == "Failed":
        if (status.get("reason") or "") == "Evicted" or _was_killed_for_memory(status):
            yield ending_of_pod(pod)
        return
    if phase != "Pending":
        return
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield _unscheduled(condition)
    for container in status.get("containerStatuses") or ():
        waiting = _state(container, "waiting")
        if waiting.get("reason") in _IMAGE_REASONS:
            yield _sentence(
                f"cannot pull the image {container.get('image', '')}: check"
                " profiler.kubernetes.image and image_pull_secrets",
                waiting.get("message"),
            )
        elif waiting.get("reason") in _CONFIG_REASONS:
            yield _sentence("cannot start", waiting.get("message"))


def _unscheduled(condition: Mapping[str, Any]) -> str:
    if condition.get("reason") == "SchedulingGated":
        return "waits for the gates of its scheduling to open"
    return _sentence(
        "has no node to run on: check the node's product label and taints against"
        " profiler.kubernetes.product, node_selector and tolerations, or wait for a free GPU",
        condition.get("message"),
    )


def _was_killed_for_memory(status: Mapping[str, Any]) -> bool:
    containers = status.get("containerStatuses") or ()
    return any(_state(c, "terminated").get("reason") == "OOMKilled" for c in containers)


def _state(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    state: Mapping[str, Any] = (container.get("state") or {}).get(kind) or {}
    return state


def _sentence(text: str, detail: str | None) -> str:
    return f"{text} ({detail[:_LONGEST_MESSAGE]})" if detail else text
