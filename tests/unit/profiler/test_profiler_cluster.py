"""Profiles on a cluster: submitted once, followed, collected, cancelled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from profile_cluster import REQUEST, Cluster, report_of, wait_for_message, wait_until

from foretoken.domain.errors import (
    CancelledJobError,
    DeviceNotPresentError,
    InterruptedJobError,
    InvalidRequestError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.cluster.submitting import name_of_job, name_request

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path, catalog_path: str) -> Iterator[Cluster]:
    with Cluster.running(tmp_path, catalog_path) as running:
        yield running


def test_shards_run_and_what_they_recorded_is_thereport_of(cluster: Cluster) -> None:
    cluster.record("0/2", num_rows=4, num_planned=4)
    cluster.record("1/2", num_rows=3, num_planned=5)
    cluster.go.touch()
    profiler = cluster.profiler()
    report = report_of(profiler, profiler.create_profile(REQUEST))
    profiler.close()
    assert ("cpu", "short") == (report.device, report.name)
    assert (9, 5, 2, 2) == (
        report.num_planned,
        report.num_measured,
        report.num_failed,
        report.num_skipped,
    )
    # m=2 and m=3 were timed by both shards, m=1 by one.
    assert report.num_repeats == 2
    (gemm,) = report.operators
    # A normal distribution that is 2 wide from p10 to p90 around 10, of which 100 were drawn.
    assert ("gemm", 5, 2) == (gemm.operator, gemm.num_measured, gemm.num_failed)
    assert gemm.interval_ratio == pytest.approx(0.016, rel=0.2)
    assert cluster.controller.num_started(name_of_job("short")) == 2


def test_calls_that_were_timed_again_count_once(cluster: Cluster) -> None:
    """A shard of 4 calls that timed 2 of them again has 6 rows: 2 flagged ones do not count."""
    cluster.record("0/1", num_rows=6, num_planned=4, num_doubted=2)
    cluster.go.touch()
    profiler = cluster.profiler(num_shards=1)
    report = report_of(profiler, profiler.create_profile(REQUEST))
    profiler.close()
    assert (4, 3, 1, 0, 0) == (
        report.num_planned,
        report.num_measured,
        report.num_failed,
        report.num_skipped,
        report.num_flagged,
    )


def test_shards_that_had_nothing_to_time_are_not_missed(cluster: Cluster) -> None:
    cluster.record("0/2", num_rows=0, num_planned=0, num_skipped=7)
    cluster.record("1/2", num_rows=3, num_planned=3, num_skipped=2)
    cluster.go.touch()
    profiler = cluster.profiler()
    report = report_of(profiler, profiler.create_profile(REQUEST))
    profiler.close()
    assert (12, 2, 1, 9) == (
        report.num_planned,
        report.num_measured,
        report.num_failed,
        report.num_skipped,
    )


def test_progress_counts_calls_and_shards(cluster: Cluster) -> None:
    cluster.record("0/2", num_rows=4, num_planned=8)
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    message = wait_for_message(profiler, job, "2 running")
    assert "0 of 2 shards done" in message
    assert "4 of 8 calls" in message
    assert profiler.get_job(job.job_id).progress_ratio == pytest.approx(0.5)
    cluster.finish("1/2")
    report_of(profiler, job)
    profiler.close()


def test_a_follower_that_was_lost_finds_its_job_again(cluster: Cluster) -> None:
    """The Job outlives whoever asked for it, and the same profile is not submitted twice."""
    first = cluster.profiler()
    wait_for_message(first, first.create_profile(REQUEST), "2 running")
    first.close()
    assert set(cluster.controller.running()) == {0, 1}
    second = cluster.profiler()
    job = second.create_profile(REQUEST)
    wait_for_message(second, job, "2 running")
    cluster.finish()
    report_of(second, job)
    # A third comes when all is over: it only collects.
    report_of(second, second.create_profile(REQUEST))
    second.close()
    assert cluster.server.requests.count(("create", "jobs")) == 1
    assert cluster.controller.num_started(name_of_job("short")) == 2


def test_two_that_submit_at_once_share_the_job(cluster: Cluster) -> None:
    profilers = [cluster.profiler() for _ in range(3)]
    jobs = [profiler.create_profile(REQUEST) for profiler in profilers]
    cluster.finish()
    reports = [report_of(p, job) for p, job in zip(profilers, jobs, strict=True)]
    for profiler in profilers:
        profiler.close()
    assert {"short"} == {report.name for report in reports}
    assert cluster.controller.num_started(name_of_job("short")) == 2


def test_another_request_under_the_name_of_a_running_one_is_refused(cluster: Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    other = ProfileRequest(device="cpu", operators=("softmax",), name="short")
    with pytest.raises(InvalidRequestError, match="something else under this name"):
        report_of(profiler, profiler.create_profile(other))
    cluster.finish()
    report_of(profiler, job)
    # Once it is over, its place is free.
    report_of(profiler, profiler.create_profile(other))
    profiler.close()


def test_cancelling_deletes_the_job_and_all_it_owns(cluster: Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    profiler.cancel_job(job.job_id)
    with pytest.raises(CancelledJobError):
        report_of(profiler, job)
    profiler.close()
    wait_until(lambda: {key[0] for key in cluster.server.store.objects} == {"nodes"})
    assert cluster.controller.running() == {}


def test_a_deleted_job_ends_the_following(cluster: Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    patch = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    cluster.server.store.change("jobs", name_of_job("short"), patch)
    with pytest.raises(InterruptedJobError, match="was deleted"):
        report_of(profiler, job)
    profiler.close()


def test_what_pods_read_belongs_to_the_job_from_the_first(cluster: Cluster) -> None:
    """Changing an owner afterwards takes rights that admission may want, as OpenShift's does."""
    profiler = cluster.profiler(credentials={"token": b"open-sesame"})
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "2 running")
    owner = cluster.server.store.get("jobs", name_of_job("short"))["metadata"]["uid"]
    made = {
        plural: body
        for _, event, (plural, _), body in cluster.server.store.history
        if event == "ADDED" and plural in ("configmaps", "secrets")
    }
    assert {"configmaps", "secrets"} == set(made)
    assert {owner} == {body["metadata"]["ownerReferences"][0]["uid"] for body in made.values()}
    changed = {plural for verb, plural in cluster.server.requests if verb == "patch"}
    assert {"jobs"} == changed
    profiler.cancel_job(job.job_id)
    profiler.close()


def test_a_job_whose_submitter_died_before_it_started_is_completed(cluster: Cluster) -> None:
    first = cluster.profiler(queue="held")
    job = first.create_profile(REQUEST)
    wait_for_message(first, job, "suspended until its queue has room")
    first.close()
    name = name_of_job("short")
    # As it was before its objects were made.
    for config in cluster.server.store.list("configmaps", lambda _: True):
        cluster.server.store.delete("configmaps", config["metadata"]["name"])
    cluster.server.store.change(
        "jobs", name, {"metadata": {"annotations": {"foretoken.dev/started": None}}}
    )
    second = cluster.profiler()
    cluster.finish()
    assert "short" == report_of(second, second.create_profile(REQUEST)).name
    assert 1 == len(cluster.server.store.list("configmaps", lambda _: True))
    second.close()


def test_a_suspended_job_waits_for_its_queue(cluster: Cluster) -> None:
    profiler = cluster.profiler(queue="gpus")
    job = profiler.create_profile(REQUEST)
    wait_for_message(profiler, job, "suspended until its queue has room")
    assert cluster.controller.running() == {}
    stored = cluster.server.store.get("jobs", name_of_job("short"))
    assert stored["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    cluster.finish()
    cluster.server.store.change("jobs", name_of_job("short"), {"spec": {"suspend": False}})
    assert "short" == report_of(profiler, job).name
    profiler.close()


def test_a_profile_waits_for_the_pods_of_one_that_is_deleted(cluster: Cluster) -> None:
    """Else the pods of both would measure the same for a while."""
    profiler = cluster.profiler()
    first = profiler.create_profile(REQUEST)
    wait_for_message(profiler, first, "2 running")
    profiler.cancel_job(first.job_id)
    second = profiler.create_profile(REQUEST)
    wait_for_message(profiler, second, "2 running")
    cluster.finish()
    assert "short" == report_of(profiler, second).name
    assert profiler.get_job(first.job_id).state is JobState.CANCELLED
    profiler.close()


def test_devices_are_those_of_the_nodes(cluster: Cluster) -> None:
    cluster.server.add_node("gpu-0", "NVIDIA-H200", 8)
    cluster.server.add_node("gpu-1", "NVIDIA-Unheard-Of", 8)
    profiler = cluster.profiler()
    assert ("cpu", "h200_sxm") == profiler.list_local_devices()
    with pytest.raises(DeviceNotPresentError, match=r"8 h200_sxm .*NVIDIA-Unheard-Of"):
        report_of(profiler, profiler.create_profile(ProfileRequest(device="b200")))
    profiler.close()


def test_a_namespace_that_does_not_exist_is_told(cluster: Cluster) -> None:
    """A server lists nothing there, and refuses what is created."""
    profiler = cluster.profiler(namespace="absent")
    with pytest.raises(InvalidRequestError, match=r'namespace.*"absent" not found'):
        report_of(profiler, profiler.create_profile(REQUEST))
    profiler.close()


def test_who_follows_a_job_changes_nothing_that_its_pods_read(cluster: Cluster) -> None:
    """A pod that is tried again finds the configuration its Job was submitted with."""
    first, second = cluster.profiler(), cluster.profiler("another:50051")
    wait_for_message(first, first.create_profile(REQUEST), "2 running")
    before = cluster.server.store.list("configmaps", lambda _: True)
    job = second.create_profile(REQUEST)
    wait_for_message(second, job, "2 running")
    assert before == cluster.server.store.list("configmaps", lambda _: True)
    cluster.finish()
    report_of(second, job)
    first.close()
    second.close()


def test_a_name_is_made_of_the_request() -> None:
    """The same request is the same profile, and one that measures again is a new one."""
    request = ProfileRequest(device="cpu", quick=True)
    assert name_request(request) == name_request(request)
    assert name_request(request).name != name_request(ProfileRequest(device="cpu")).name
    again = ProfileRequest(device="cpu", skip_covered=False)
    assert name_request(again).name != name_request(again).name


def test_another_controller_goes_on_with_what_one_left(cluster: Cluster) -> None:
    """Under the same name, with one Job in the cluster; both know the result."""
    first, second = (cluster.profiler(shares_jobs=True) for _ in range(2))
    job = first.create_profile(REQUEST)
    wait_for_message(second, job, "2 running")
    first.close()
    cluster.record("0/2", num_rows=4, num_planned=4)
    cluster.record("1/2", num_rows=3, num_planned=5)
    cluster.go.touch()
    assert 5 == report_of(second, job).num_measured
    second.close()
    assert 2 == cluster.controller.num_started(name_of_job("short"))


def test_a_profile_is_cancelled_where_nobody_follows_it(cluster: Cluster) -> None:
    """Between two controllers, or by one that does not follow it: the Job costs money."""
    first, second = (cluster.profiler(shares_jobs=True) for _ in range(2))
    job = first.create_profile(REQUEST)
    wait_for_message(second, job, "2 running")
    wait_until(lambda: bool(second._jobs.published(job.job_id, "submitted")))
    second.cancel_job(job.job_id)
    with pytest.raises(CancelledJobError):
        report_of(second, job)
    for profiler in (first, second):
        profiler.close()
    wait_until(lambda: {key[0] for key in cluster.server.store.objects} == {"nodes"})
    assert cluster.controller.running() == {}
