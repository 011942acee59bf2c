"""The shipped Role is enough for whatever a profile meets, and nothing in it is too much."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from profile_cluster import REQUEST, Cluster, report_of, wait_for_message, wait_until

from foretoken.domain.errors import ForetokenError, InterruptedJobError
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.cluster.spec import CollectiveSpec

_ROLE = Path(__file__).parents[3] / "deploy/k8s/components/profiler-controller/role.yaml"
# A server that does not know its callers for a moment is asked again; here it never will.
_SETTINGS: Mapping[str, Any] = {"refused_s_max": 0.2, "start_s_max": 2, "retries_per_shard": 0}


def _granted() -> list[tuple[str, str]]:
    """Return what the Role, and the ClusterRole for nodes, let the controller do."""
    documents = yaml.safe_load_all(_ROLE.read_text(encoding="utf-8"))
    return [
        (resource, verb)
        for document in documents
        for rule in document.get("rules", ())
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


@pytest.fixture
def cluster(tmp_path: Path, catalog_path: str) -> Iterator[Cluster]:
    with Cluster.running(tmp_path, catalog_path) as running:
        yield running


def _fail(cluster: Cluster) -> None:
    """Show a token, have a shard fail, and be given its last words."""
    cluster.controller.run_instead(cluster.program("sys.exit('no room for gemm')"))
    profiler = cluster.profiler(credentials={"token": b"open"}, num_shards=1, **_SETTINGS)
    try:
        with pytest.raises(InterruptedJobError, match="no room for gemm"):
            report_of(profiler, profiler.create_profile(REQUEST))
    finally:
        profiler.close()


def _be_refused_pods(cluster: Cluster) -> None:
    """Learn why there are no pods."""
    cluster.controller.refuses_pods = "exceeded quota: gpus"
    profiler = cluster.profiler(**_SETTINGS)
    try:
        job = profiler.create_profile(REQUEST)
        wait_for_message(profiler, job, "exceeded quota: gpus")
        profiler.cancel_job(job.job_id)
    finally:
        profiler.close()


def _cancel(cluster: Cluster) -> None:
    """Leave nothing of a Job that is cancelled."""
    profiler = cluster.profiler(**_SETTINGS)
    try:
        job = profiler.create_profile(REQUEST)
        wait_for_message(profiler, job, "2 running")
        profiler.cancel_job(job.job_id)
        wait_until(lambda: {kind for kind, _ in cluster.server.store.objects} == {"nodes"}, 5.0)
    finally:
        profiler.close()


def _follow(cluster: Cluster) -> None:
    """Learn at once what changes; without watches a look now and then has to do."""
    profiler = cluster.profiler(**_SETTINGS)
    try:
        job = profiler.create_profile(REQUEST)
        messages = []
        for state in profiler.watch_job(job.job_id):
            messages.append(state.message)
            if "2 running" in state.message or "does not answer" in state.message:
                cluster.go.touch()
        assert not [one for one in messages if "does not answer" in one]
    finally:
        profiler.close()


def _meet(cluster: Cluster) -> None:
    """Time collectives in pods that find each other by a Service."""
    cluster.server.add_node("other")
    cluster.controller.run_instead(["python3", "-I", "-S", "-c", ""])
    cluster.record("0/1", num_rows=0, num_planned=0)
    profiler = cluster.profiler(collectives=CollectiveSpec(gpus_per_node=1), **_SETTINGS)
    try:
        request = ProfileRequest(device="cpu", operators=("all_reduce",), name="short")
        report_of(profiler, profiler.create_profile(request))
    finally:
        profiler.close()


def _see_devices(cluster: Cluster) -> None:
    profiler = cluster.profiler(**_SETTINGS)
    try:
        assert ("cpu",) == profiler.list_local_devices()
    finally:
        profiler.close()


# What of a profile needs which right most.
_JOURNEYS: Mapping[tuple[str, str], Callable[[Cluster], None]] = {
    ("jobs", "create"): _fail,
    ("jobs", "list"): _fail,
    ("jobs", "watch"): _follow,
    ("jobs", "patch"): _fail,
    ("jobs", "delete"): _cancel,
    ("configmaps", "create"): _fail,
    ("secrets", "create"): _fail,
    ("services", "create"): _meet,
    ("pods", "list"): _fail,
    ("events", "list"): _be_refused_pods,
    ("pods/log", "get"): _fail,
    ("nodes", "list"): _see_devices,
}


def _grant(cluster: Cluster, rights: list[tuple[str, str]]) -> None:
    cluster.server.rules = [{"resources": [one], "verbs": [verb]} for one, verb in rights]


def test_every_right_has_a_journey_that_needs_it() -> None:
    assert sorted(_JOURNEYS) == sorted(_granted())


@pytest.mark.slow
@pytest.mark.parametrize("journey", sorted({*_JOURNEYS.values()}, key=lambda one: one.__name__))
def test_the_role_is_enough(cluster: Cluster, journey: Callable[[Cluster], None]) -> None:
    _grant(cluster, _granted())
    journey(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("right", _JOURNEYS, ids=" ".join)
def test_without_one_right_a_profile_fails(cluster: Cluster, right: tuple[str, str]) -> None:
    _grant(cluster, [one for one in _granted() if one != right])
    with pytest.raises((ForetokenError, AssertionError, pytest.fail.Exception)):
        _JOURNEYS[right](cluster)
    cluster.server.rules = None
