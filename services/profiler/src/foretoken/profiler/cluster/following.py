"""Follow a Job until it ends, and say what keeps its pods from working."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from foretoken.domain.errors import (
    InterruptedJobError,
    NotAllowedError,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from foretoken.profiler.cluster.api import ClusterApi, Resource, ResourceVersionGoneError
from foretoken.profiler.cluster.objects import CONTAINER, INDEX_KEY, JOB_LABEL
from foretoken.profiler.cluster.spec import KubernetesSpec

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_LONGEST_MESSAGE = 300
# The name of a pod that is not made: each try has another.
_NAME_OF_POD = re.compile(r'(?<=\bpods) "[^"]*"')


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


def ending_of_pod(pod: Resource, ending: str = "failed") -> str:
    """Return how a pod ended, `ending` where its state does not say more."""
    status = pod.get("status") or {}
    if status.get("reason"):
        return _sentence(f"was stopped: {status['reason']}", status.get("message"))
    for container in status.get("containerStatuses") or ():
        terminated = _state(container, "terminated")
        if terminated:
            if terminated.get("reason") == "OOMKilled":
                return _OUT_OF_MEMORY
            return f"ended with status {terminated.get('exitCode', '?')}"
    return ending


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


_log = logging.getLogger(__name__)

_NUM_LOG_LINES = 20
_PAUSE_S = 0.1
# So long a controller may take to make pods, and a node to mount what a pod reads.
_PODLESS_S, _STUCK_S = 30.0, 30.0
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """How a Job stands.

    `num_failed_pods` were or will be replaced. `pod_failures` say what keeps pods from working.
    `ending` is the condition that ended it (`Complete` or `Failed`), `reason` why.
    """

    num_pods: int
    num_succeeded: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_failed_pods: int = 0
    is_suspended: bool = False
    failed_shards: tuple[int, ...] = ()
    pod_failures: tuple[str, ...] = ()
    ending: str = ""
    reason: str = ""


class JobFollower:
    """Watches one Job."""

    def __init__(
        self,
        api: ClusterApi,
        spec: KubernetesSpec,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow Jobs of this namespace."""
        self._api = api
        self._spec = spec
        self._sleep = sleep
        self._clock = clock
        # When a Job that should have pods was first seen without them.
        self._without_pods_s: float | None = None

    def follow(self, job_name: str) -> Iterator[JobView | None]:
        """Yield how the Job stands at its changes and now and then, its ending last.

        None stands for moments in which the API server cannot be reached, or does not know yet who
        may do what, as one that starts.

        Raises:
            InterruptedJobError: the Job was deleted.
            ServiceUnavailableError: the API server was away for too long.
            UnauthenticatedError, NotAllowedError: it refused for too long, or from the first.

        """
        lost_since_s: float | None = None
        pause_s = 1.0
        is_known = False
        while True:
            try:
                for view in self._follow_once(job_name):
                    yield view
                    if view.ending:
                        return
                    lost_since_s, pause_s, is_known = None, 1.0, True
            except ResourceVersionGoneError:
                # The loop lists anew.
                _log.info("job=%s: the watch was too old", job_name)
                self._sleep(_PAUSE_S)
            except (ServiceUnavailableError, UnauthenticatedError, NotAllowedError) as err:
                now_s = self._clock()
                lost_since_s = now_s if lost_since_s is None else lost_since_s
                is_away = isinstance(err, ServiceUnavailableError)
                longest_s = self._spec.lost_s_max if is_away else self._spec.refused_s_max
                if now_s - lost_since_s > longest_s or not (is_away or is_known):
                    raise type(err)(
                        f"{err.message}; the Job {job_name} goes on, and the same command"
                        f" follows it again; `{self._api.end_command(job_name)}` ends it"
                    ) from err
                _log.warning("job=%s: %s", job_name, err.message)
                yield None
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def describe_failure(self, job_name: str, view: JobView) -> str:
        """Return what failed: the shards, how they ended, and what they wrote last."""
        pods = self._latest_pods(job_name, "Failed")
        lines = [
            line
            for shard in view.failed_shards or sorted(pods)
            for line in self._last_words(shard, pods.get(shard), "failed")
        ]
        return "\n".join((f"the Job {job_name} failed: {view.reason}", *lines))

    def describe_silence(self, job_name: str, shards: Sequence[int]) -> str:
        """Return how the pods of these shards ended, and what they wrote last."""
        pods = self._latest_pods(job_name, "Succeeded")
        return "\n".join(
            line for shard in shards for line in self._last_words(shard, pods.get(shard), "ended")
        )

    def _latest_pods(self, job_name: str, phase: str) -> Mapping[int, Resource]:
        """Return the newest pod of each shard that is in a phase."""
        pods = sorted(self._list_pods(job_name), key=_creation_of_pod)
        return {
            index_of_pod(pod): pod
            for pod in pods
            if (pod.get("status") or {}).get("phase") == phase
        }

    def _last_words(self, shard: int, pod: Resource | None, ending: str) -> Iterator[str]:
        if pod is None:
            yield f"shard {shard} {ending}; its pod is gone"
            return
        name = pod["metadata"]["name"]
        node = pod["spec"].get("nodeName")
        where = f"{name} on {node}" if node else name
        yield f"shard {shard} {ending_of_pod(pod, ending)} (pod {where})"
        for line in self._api.read_log(name, CONTAINER, _NUM_LOG_LINES).splitlines():
            yield f"  {line}"

    def _follow_once(self, job_name: str) -> Iterator[JobView]:
        """Yield from one look at the Job, and from watches that begin there."""
        found, version = self._api.find_job(job_name)
        if found is None:
            raise _deleted(job_name)
        job: Resource = found
        while True:
            yield self._view(job)
            for event in self._api.watch_job(job_name, version, self._spec.follow_s):
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                job = event["object"]
                if event["type"] == "DELETED":
                    raise _deleted(job_name)
                yield self._view(job)
            # A server that ends watches at once is not asked in a circle.
            self._sleep(_PAUSE_S)

    def _view(self, job: Resource) -> JobView:
        status = job.get("status") or {}
        spec = job["spec"]
        ending = next(
            (
                condition
                for condition in status.get("conditions") or ()
                if condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
            ),
            None,
        )
        num_active = int(status.get("active") or 0)
        num_ready = min(int(status.get("ready") or 0), num_active)
        failed_shards = parse_indexes(status.get("failedIndexes") or "")
        num_pods, num_succeeded = int(spec["completions"]), int(status.get("succeeded") or 0)
        num_wanted = min(int(spec["parallelism"]), num_pods - num_succeeded - len(failed_shards))
        is_suspended = bool(spec.get("suspend"))
        lacks_pods = num_active < num_wanted and not is_suspended
        # A pod that works needs no second look.
        failures = () if ending else self._find_failures(job["metadata"], lacks_pods=lacks_pods)
        return JobView(
            num_pods=num_pods,
            num_succeeded=num_succeeded,
            num_running=num_ready,
            num_waiting=num_active - num_ready,
            num_failed_pods=int(status.get("failed") or 0),
            is_suspended=is_suspended,
            failed_shards=failed_shards,
            pod_failures=failures,
            ending=ending["type"] if ending else "",
            reason=str(ending.get("message") or ending.get("reason") or "") if ending else "",
        )

    def _find_failures(self, job: Mapping[str, Any], *, lacks_pods: bool) -> tuple[str, ...]:
        """Return what keeps a Job's pods from being made, and those that are from working."""
        name, uid = str(job["name"]), str(job["uid"])
        pods = self._list_pods(name)
        found = find_pod_failures(pods)
        stuck = [pod for pod in pods if is_stuck(pod, datetime.now(UTC))]
        warnings = self._api.list_warnings() if lacks_pods or stuck else []
        if lacks_pods and (message := _last_message(warnings, uid, "FailedCreate")):
            found.insert(
                0, _sentence("the cluster refuses its pods", _NAME_OF_POD.sub("", message))
            )
        for pod in stuck:
            if message := _last_message(warnings, pod["metadata"]["uid"]):
                found.append(_sentence(f"shard {index_of_pod(pod)} does not start", message))
        if not lacks_pods or pods:
            self._without_pods_s = None
        else:
            now_s = self._clock()
            if self._without_pods_s is None:
                self._without_pods_s = now_s
            if not found and now_s - self._without_pods_s >= _PODLESS_S:
                found.append(
                    f"no pod of it exists after {_PODLESS_S:.0f} s;"
                    f" `{self._api.describe_command(name)}` says why"
                )
        return tuple(found)

    def _list_pods(self, job_name: str) -> list[Resource]:
        return self._api.list_pods(f"{JOB_LABEL}={job_name}")


def is_stuck(pod: Resource, now: datetime) -> bool:
    """Return whether a pod has a node and makes no container, which its state does not explain."""
    status = pod.get("status") or {}
    waiting = [_state(c, "waiting") for c in status.get("containerStatuses") or ()]
    is_making = any(w.get("reason") == "ContainerCreating" for w in waiting)
    created = pod["metadata"].get("creationTimestamp")
    if status.get("phase") != "Pending" or not is_making or not created:
        return False
    return (now - datetime.fromisoformat(created)).total_seconds() > _STUCK_S


def _last_message(warnings: Sequence[Resource], uid: str, reason: str | None = None) -> str:
    """Return what the cluster complained of last about an object, and none of its name before."""
    return next(
        (
            str(event.get("message") or event.get("reason") or "")
            for event in reversed(warnings)
            if event["involvedObject"].get("uid") == uid and reason in (None, event.get("reason"))
        ),
        "",
    )


class StartPatience:
    """How long a Job may have nothing that runs, from when it may: 0 for any time."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the first view."""
        self._limit_s = limit_s
        self._clock = clock
        self._idle_since_s: float | None = None

    def is_over(self, view: JobView) -> bool:
        """Return whether nothing has run for too long, as of this view."""
        has_begun = view.num_running or view.num_succeeded or view.num_failed_pods or view.ending
        if has_begun or view.is_suspended:
            self._idle_since_s = None
            return False
        now_s = self._clock()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return 0 < self._limit_s <= now_s - self._idle_since_s


def progress_ratio(view: JobView, num_recorded: int, num_planned: int) -> float:
    """Return how far a Job is: by its calls where those are known, else by its shards."""
    by_shards = view.num_succeeded / view.num_pods
    if not num_planned:
        return by_shards
    return max(by_shards, min(num_recorded / num_planned, 1.0))


def describe_progress(job_name: str, view: JobView, num_recorded: int, num_planned: int) -> str:
    """Return how a Job stands, in words; what keeps it from going on comes first."""
    parts = [*view.pod_failures]
    if view.is_suspended:
        parts.append("suspended until its queue has room")
    parts.append(f"{view.num_succeeded} of {view.num_pods} shards done")
    for count, word in ((view.num_running, "running"), (view.num_waiting, "waiting")):
        if count:
            parts.append(f"{count} {word}")
    if view.num_failed_pods:
        parts.append(f"{view.num_failed_pods} pods failed and are tried again")
    if num_planned:
        parts.append(f"{num_recorded:,} of {num_planned:,} calls")
    elif num_recorded:
        parts.append(f"{num_recorded:,} calls")
    return f"{job_name}: {', '.join(parts)}"


def parse_indexes(text: str) -> tuple[int, ...]:
    """Return the indexes that Kubernetes writes as `1,3-5`."""
    indexes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        indexes += range(int(first), int(last or first) + 1)
    return tuple(indexes)


def _creation_of_pod(pod: Resource) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))


def _deleted(job_name: str) -> InterruptedJobError:
    return InterruptedJobError(
        f"the Job {job_name} was deleted; what it measured is in the catalog, and the same command"
        " goes on from there"
    )
