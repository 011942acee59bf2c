"""Profiles on a cluster that refuses, fails or is away: what is reported, and what stays behind."""

import itertools
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from kubernetes_server import KubernetesServer
from profile_cluster import REQUEST, Cluster, report_of, wait_for_message, wait_until

import foretoken
from foretoken.domain.errors import (
    ForetokenError,
    InterruptedJobError,
    NotAllowedError,
    ServiceUnavailableError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.cluster.api import ClusterApi
from foretoken.profiler.cluster.following import JobFollower, is_stuck
from foretoken.profiler.cluster.objects import JobPlan, build_job, start_job
from foretoken.profiler.cluster.spec import KubernetesSpec, PodSetup
from foretoken.profiler.cluster.submitting import name_of_job, name_request

# Processes stand for pods, and failures take their time; `make test-kubernetes` has them, too.
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path, catalog_path: str) -> Iterator[Cluster]:
    with Cluster.running(tmp_path, catalog_path) as running:
        yield running


def test_a_failed_shard_is_named_with_its_last_words(cluster: Cluster) -> None:
    """The others finish first; the same command then tries again."""
    text = "shard == 1 and sys.exit('no room for gemm')"
    cluster.controller.run_instead(cluster.program(text))
    profiler = cluster.profiler(retries_per_shard=1)
    with pytest.raises(InterruptedJobError) as caught:
        report_of(profiler, profiler.create_profile(REQUEST))
    assert "shard 1 ended with status 1" in caught.value.message
    assert "  no room for gemm" in caught.value.message
    assert "shard 0" not in caught.value.message
    assert cluster.controller.num_started(name_of_job("short")) == 3
    cluster.finish()
    cluster.controller.run_instead(cluster.program())
    assert "short" == report_of(profiler, profiler.create_profile(REQUEST)).name
    profiler.close()


def test_pods_that_end_well_and_record_nothing_are_named(cluster: Cluster) -> None:
    """Where they record elsewhere, or are of another image; the same command starts them again."""
    cluster.record("0/2", num_rows=4, num_planned=4)
    cluster.controller.run_instead(cluster.program("shard == 1 and print('no such thing here')"))
    profiler = cluster.profiler()
    with pytest.raises(InterruptedJobError) as caught:
        report_of(profiler, profiler.create_profile(REQUEST))
    assert "of 1 of its 2 pods this catalog has no run" in caught.value.message
    assert f"shard 1 ended with status 0 (pod {name_of_job('short')}-1-" in caught.value.message
    assert "on worker)\n  no such thing here\n" in caught.value.message
    assert "catalog:50051, where they record" in caught.value.message
    assert "shard 0" not in caught.value.message
    cluster.record("1/2", num_rows=4, num_planned=4)
    assert 6 == report_of(profiler, profiler.create_profile(REQUEST)).num_measured
    assert 2 == cluster.controller.num_started(name_of_job("short"))
    profiler.close()


def test_a_job_that_recorded_nothing_is_made_again(cluster: Cluster) -> None:
    cluster.controller.run_instead(cluster.program("pass"))
    profiler = cluster.profiler()
    with pytest.raises(InterruptedJobError, match="of 2 of its 2 pods"):
        report_of(profiler, profiler.create_profile(REQUEST))
    cluster.controller.run_instead(cluster.program())
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    cluster.finish()
    assert "short" == report_of(profiler, job).name
    assert 2 == cluster.server.requests.count(("create", "jobs"))
    profiler.close()


def test_wrong_usage_is_not_tried_again(cluster: Cluster) -> None:
    cluster.controller.run_instead(cluster.program("sys.exit(2)"))
    profiler = cluster.profiler(num_shards=1)
    with pytest.raises(InterruptedJobError, match="shard 0 ended with status 2"):
        report_of(profiler, profiler.create_profile(REQUEST))
    profiler.close()
    assert cluster.controller.num_started(name_of_job("short")) == 1


def test_what_keeps_pods_from_running_is_told(cluster: Cluster) -> None:
    profiler = cluster.profiler(node_selector={"pool": "absent"})
    job = profiler.create_profile(REQUEST)
    message = wait_for_message(profiler, job, "has no node to run on")
    assert "shards 0, 1" in message
    assert "profiler.kubernetes.product" in message
    profiler.cancel_job(job.job_id)
    profiler.close()


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("ImagePullBackOff", f"cannot pull the image foretoken-profiler:{foretoken.__version__}"),
        ("CreateContainerConfigError", "cannot start (secret not found)"),
    ],
)
def test_a_container_that_cannot_start_is_told(cluster: Cluster, reason: str, told: str) -> None:
    cluster.controller.refuse_start = lambda _: {"reason": reason, "message": "secret not found"}
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    assert "secret not found" in wait_for_message(profiler, job, told)
    profiler.cancel_job(job.job_id)
    profiler.close()


@pytest.mark.parametrize(
    "why",
    [
        "exceeded quota: gpus, requested: 1, used: 8",
        'violates PodSecurity "restricted:latest"',
        'error looking up service account: "profiler" not found',
    ],
)
def test_pods_that_are_refused_are_told_with_the_reason(cluster: Cluster, why: str) -> None:
    """There is no pod then whose state could tell. Each try is of a pod of another name."""
    cluster.controller.refuses_pods = why
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    told = f"the cluster refuses its pods (Error creating: pods is forbidden: {why})"
    wait_for_message(profiler, job, told)
    wait_until(lambda: len(cluster.server.store.list("events", lambda _: True)) > 2)
    assert [told] == list(profiler.get_job(job.job_id).notices)[1:]
    cluster.controller.refuses_pods = ""
    wait_for_message(profiler, job, "2 running")
    cluster.finish()
    assert "short" == report_of(profiler, job).name
    profiler.close()


def test_a_job_without_pods_is_told_after_a_while(tmp_path: Path) -> None:
    """Whoever makes pods may be away, and nobody complains."""
    request = name_request(REQUEST)
    plan = JobPlan(job_name="silent", request=request, num_pods=2)
    # One look at the clock for each look at the pods.
    times_s = iter((0.0, 29.0, 31.0))
    with KubernetesServer() as server:
        spec = KubernetesSpec(kubeconfig=str(server.write_kubeconfig(tmp_path)), follow_s=1)
        api = ClusterApi.connect(spec)
        body = build_job(plan, spec, PodSetup(catalog="catalog:50051"), "content")
        api.change_job(api.create_job(body), start_job(spec))
        follower = JobFollower(api, spec, lambda _: None, lambda: next(times_s))
        views = itertools.islice(follower.follow("silent"), 3)
        told = [view.pod_failures for view in views if view is not None]
        api.close()
    command = f"kubectl --kubeconfig {spec.kubeconfig} --namespace foretoken describe job silent"
    assert [(), (), (f"no pod of it exists after 30 s; `{command}` says why",)] == told


def test_what_was_said_of_a_job_of_that_name_before_is_not_told(tmp_path: Path) -> None:
    """Events outlive what they are about by an hour."""
    plan = JobPlan(job_name="again", request=name_request(REQUEST), num_pods=2)
    with KubernetesServer() as server:
        spec = KubernetesSpec(kubeconfig=str(server.write_kubeconfig(tmp_path)), follow_s=1)
        api = ClusterApi.connect(spec)
        body = build_job(plan, spec, PodSetup(catalog="catalog:50051"), "content")
        told = []
        for is_refused in (True, False):
            api.change_job(api.create_job(body), start_job(spec))
            if is_refused:
                server.warn("jobs", "again", "FailedCreate", "exceeded quota")
            view = next(JobFollower(api, spec).follow("again"))
            assert view is not None
            told.append(view.pod_failures)
            server.store.delete("jobs", "again")
        api.close()
    assert [("the cluster refuses its pods (exceeded quota)",), ()] == told


def test_a_server_that_is_away_is_reported_briefly(tmp_path: Path) -> None:
    with KubernetesServer() as server:
        spec = KubernetesSpec(kubeconfig=str(server.write_kubeconfig(tmp_path)))
    api = ClusterApi.connect(spec)
    with pytest.raises(ServiceUnavailableError, match=r"cannot be reached: .*refused$") as caught:
        api.find_job("short")
    api.close()
    assert "Max retries" not in caught.value.message


def test_a_pod_that_cannot_mount_what_it_reads_is_told(cluster: Cluster) -> None:
    """Its state says no more than that its container is being made."""
    waiting = {"reason": "ContainerCreating"}
    created = "2026-01-01T00:00:00Z"
    pod = {
        "metadata": {"name": "silent-0", "creationTimestamp": created},
        "status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]},
    }
    start = datetime.fromisoformat(created)
    assert [False, False, True] == [
        is_stuck(pod, start + timedelta(seconds=age_s)) for age_s in (0, 30, 31)
    ]
    missing = 'MountVolume.SetUp failed for volume "catalog" : secret "catalog-access" not found'
    cluster.controller.refuse_start = lambda started: (
        cluster.server.warn("pods", started["metadata"]["name"], "FailedMount", missing)
        or {**waiting, "message": ""}
    )
    profiler = cluster.profiler(num_shards=1)
    job = profiler.create_profile(REQUEST)
    wait_until(lambda: bool(cluster.server.store.list("pods", lambda _: True)))
    (made,) = cluster.server.store.list("pods", lambda _: True)
    cluster.server.store.change(
        "pods", made["metadata"]["name"], {"metadata": {"creationTimestamp": created}}
    )
    wait_for_message(profiler, job, f"shard 0 does not start ({missing})")
    profiler.cancel_job(job.job_id)
    profiler.close()


def test_every_trouble_is_told_once_and_first_how_to_end_the_job(cluster: Cluster) -> None:
    profiler = cluster.profiler(node_selector={"pool": "absent"})
    job = profiler.create_profile(REQUEST)
    for _ in range(3):
        wait_for_message(profiler, job, "has no node to run on")
    ending, *troubles = profiler.get_job(job.job_id).notices
    command = f"--namespace foretoken delete job {name_of_job('short')}` ends it"
    assert command in ending
    assert ["shards 0, 1 has no node to run on"] == [t.partition(":")[0] for t in troubles]
    profiler.cancel_job(job.job_id)
    profiler.close()


def test_a_job_of_which_nothing_runs_is_given_up_with_the_reason(cluster: Cluster) -> None:
    """Where people do not wait, as in CI, it would hang for ever."""
    cluster.controller.refuses_pods = "exceeded quota"
    profiler = cluster.profiler(start_s_max=1)
    job = profiler.create_profile(REQUEST)
    with pytest.raises(InterruptedJobError, match=r"has run for 1 s \(.*exceeded quota.*deleted"):
        report_of(profiler, job)
    wait_until(lambda: not cluster.server.store.list("jobs", lambda _: True))
    profiler.close()


def test_one_that_waits_in_a_queue_is_not_given_up(cluster: Cluster) -> None:
    profiler = cluster.profiler(queue="gpus", start_s_max=1)
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "suspended until its queue has room")
    time.sleep(2.5)
    assert JobState.RUNNING is profiler.get_job(job.job_id).state
    cluster.server.store.change("jobs", name_of_job("short"), {"spec": {"suspend": False}})
    cluster.finish()
    assert "short" == report_of(profiler, job).name
    profiler.close()


def test_a_server_that_starts_may_not_know_its_callers_for_a_while(cluster: Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    cluster.server.num_unknown = 3
    cluster.server.store.drop_watches()
    wait_until(lambda: not cluster.server.num_unknown)
    cluster.finish()
    assert "short" == report_of(profiler, job).name
    profiler.close()


@pytest.mark.parametrize("spec", [{"refused_s_max": 0.5}, {"lost_s_max": 0.5}])
def test_who_gives_up_following_says_what_ends_the_job(
    cluster: Cluster, spec: dict[str, float]
) -> None:
    profiler = cluster.profiler(**spec)
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    if "refused_s_max" in spec:
        cluster.server.num_unknown = 1_000
    else:
        cluster.server.num_outages = 1_000
    cluster.server.store.drop_watches()
    with pytest.raises(ForetokenError) as caught:
        report_of(profiler, job)
    assert f"delete job {name_of_job('short')}` ends it" in caught.value.message
    cluster.server.num_unknown = cluster.server.num_outages = 0
    profiler.close()


def test_a_cancellation_that_fails_says_what_ends_the_job(cluster: Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    cluster.server.rules = [{"verbs": ["create", "get", "list", "watch", "patch"]}]
    with pytest.raises(NotAllowedError, match=f"delete job {name_of_job('short')}` ends it"):
        profiler.cancel_job(job.job_id)
    assert JobState.RUNNING is profiler.get_job(job.job_id).state
    cluster.server.rules = None
    profiler.cancel_job(job.job_id)
    profiler.close()


@pytest.mark.parametrize("refused", ["jobs", "configmaps", "secrets"])
def test_a_job_that_is_refused_leaves_nothing_behind(cluster: Cluster, refused: str) -> None:
    """Least of all the Secret with the token, and no Job that costs money."""
    granted = {"jobs", "configmaps", "secrets", "pods", "events", "nodes"}
    cluster.server.rules = [
        {"resources": sorted(granted - {refused}), "verbs": ["create"]},
        {"verbs": ["list", "watch", "patch", "delete"]},
    ]
    profiler = cluster.profiler(credentials={"token": b"open-sesame"})
    with pytest.raises(NotAllowedError, match=f"create {refused}"):
        report_of(profiler, profiler.create_profile(REQUEST))
    wait_until(lambda: {key[0] for key in cluster.server.store.objects} == {"nodes"})
    assert cluster.controller.running() == {}
    profiler.close()


@pytest.mark.parametrize("failure", ["gone", "dropped", "away"])
def test_following_survives_the_api_server(cluster: Cluster, failure: str) -> None:
    """Versions that are Gone, connections that break, answers of 503: the Job's end is seen."""
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    for _ in range(3):
        if failure == "gone":
            cluster.server.store.expire()
        elif failure == "dropped":
            cluster.server.store.drop_watches()
        else:
            cluster.server.num_outages = 2
            cluster.server.store.drop_watches()
        time.sleep(0.3)
    cluster.finish()
    assert "short" == report_of(profiler, job).name
    profiler.close()
    assert cluster.server.requests.count(("create", "jobs")) == 1


def test_an_api_server_that_stays_away_is_told_in_the_end(cluster: Cluster) -> None:
    profiler = cluster.profiler(lost_s_max=0.5)
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    cluster.server.num_outages = 1_000
    cluster.server.store.drop_watches()
    with pytest.raises(ServiceUnavailableError, match="goes on, and the same command follows"):
        report_of(profiler, job)
    cluster.server.num_outages = 0
    profiler.close()


def test_without_the_right_to_see_nodes_the_scheduler_tells(cluster: Cluster) -> None:
    cluster.server.rules = [
        {"resources": ["jobs"], "verbs": ["create", "list", "watch", "patch", "delete"]},
        {"resources": ["configmaps"], "verbs": ["create"]},
        {"resources": ["pods"], "verbs": ["list"]},
    ]
    profiler = cluster.profiler()
    with pytest.raises(NotAllowedError, match="list nodes"):
        profiler.list_local_devices()
    job = profiler.create_profile(ProfileRequest(device="b200"))
    wait_for_message(profiler, job, "has no node to run on")
    profiler.cancel_job(job.job_id)
    profiler.close()
