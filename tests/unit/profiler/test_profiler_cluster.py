"""Profiles on a cluster: submitted once, followed through failure, collected, cancelled."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_jobs import JobController
from kubernetes_server import KubernetesServer

import foretoken
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    CancelledJobError,
    DeviceNotPresentError,
    InterruptedJobError,
    InvalidRequestError,
    NotAllowedError,
    ServiceUnavailableError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.measurements.profiling import ProfileOutline, ProfileReport, ProfileRequest
from foretoken.profiler.cluster.service import ClusterProfiler
from foretoken.profiler.cluster.spec import KubernetesSpec, PodSetup
from foretoken.profiler.cluster.submitting import name_of_job, name_request
from foretoken.wire.arrow import rows_to_table

_REQUEST = ProfileRequest(device="cpu", operators=("gemm",), name="short")
# A shard that ends well as soon as there is a file `go`.
_WAITS = "while not pathlib.Path({go!r}).exists(): time.sleep(0.01)"
_SHARD = "os.environ['FORETOKEN_PROFILER__SHARD_INDEX']"


class _Cluster:
    """An API server, its controller, and a catalog; profilers connect to them."""

    def __init__(self, folder: Path, catalog_path: str) -> None:
        self.folder = folder
        self.go = folder / "go"
        config = CatalogConfig(path=catalog_path, num_threads=1, state_folder=str(folder / "state"))
        self.catalog = CatalogService(config)
        self.server = KubernetesServer()
        self.controller = JobController(self.server, folder / "pods", program=self.program())

    def program(self, text: str = "") -> list[str]:
        """Return a program in the place of a shard's own: it waits unless set otherwise."""
        text = text or _WAITS.format(go=str(self.go))
        return [
            "python3",
            "-I",
            "-S",
            "-c",
            f"import os, pathlib, sys, time; shard = int({_SHARD})\n{text}",
        ]

    def profiler(self, address: str = "catalog:50051", **settings: object) -> ClusterProfiler:
        """Return an open profiler with files of its own, as another process would have."""
        settings = {"num_shards": 2, "follow_s": 1, **settings}
        kubeconfig = str(self.server.write_kubeconfig(self.folder))
        spec = KubernetesSpec(kubeconfig=kubeconfig, **settings)  # type: ignore[arg-type]
        setup = PodSetup(catalog=address)
        home = self.folder / f"home-{time.monotonic_ns()}"
        profiler = ClusterProfiler(spec, setup, self.catalog, home, _outline)
        profiler.open()
        return profiler

    def record(self, shard: str, num_rows: int, num_planned: int, num_doubted: int = 0) -> None:
        """Record what a shard would; the first `num_doubted` timed rows are flagged."""
        environment = {"profile": "short", "shard": shard, "num_planned": str(num_planned)}
        run = Run(
            run_id=f"run-{shard}".replace("/", "-"),
            kind=RunKind.PROFILE,
            tool="tests",
            environment=environment,
        )
        rows = rows_to_table(
            [
                {
                    "operator": "gemm",
                    "phase": "forward",
                    "dtype": "fp32",
                    "dims": {"m": 1 + index % 3, "n": 64, "k": 64},
                    "device": "cpu",
                    "latency_us_median": 10.0 + index,
                    "latency_us_p10": 9.0 + index,
                    "latency_us_p90": 11.0 + index,
                    "num_samples": 100,
                    "status": "failed" if index == 0 else "ok",
                    "flags": ["busy_machine: tests"] if 0 < index <= num_doubted else [],
                }
                for index in range(num_rows)
            ]
        )
        list(self.catalog.record(run, [MeasurementBatch(batch_index=0, rows=rows, is_last=True)]))


def _outline(request: ProfileRequest) -> ProfileOutline:
    return ProfileOutline(name=request.name, device=request.device)


@pytest.fixture
def cluster(tmp_path: Path, catalog_path: str) -> Iterator[_Cluster]:
    cluster = _Cluster(tmp_path, catalog_path)
    cluster.server.add_node("worker")
    cluster.catalog.open()
    with cluster.server, cluster.controller:
        yield cluster
    cluster.catalog.close()


def _wait_for_message(profiler: ClusterProfiler, job: Job, text: str) -> str:
    for state in profiler.watch_job(job.job_id):
        if text in state.message:
            return state.message
    pytest.fail(f"never said {text!r}, but {profiler.get_job(job.job_id)}")


def _report(profiler: ClusterProfiler, job: Job) -> ProfileReport:
    assert list(profiler.watch_job(job.job_id))[-1].state.is_final
    return profiler.get_profile_report(job.job_id)


def test_shards_run_and_what_they_recorded_is_the_report(cluster: _Cluster) -> None:
    cluster.record("0/2", num_rows=4, num_planned=4)
    cluster.record("1/2", num_rows=3, num_planned=5)
    cluster.go.touch()
    profiler = cluster.profiler()
    report = _report(profiler, profiler.create_profile(_REQUEST))
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


def test_calls_that_were_timed_again_count_once(cluster: _Cluster) -> None:
    """A shard of 4 calls that timed 2 of them again has 6 rows: 2 flagged ones do not count."""
    cluster.record("0/1", num_rows=6, num_planned=4, num_doubted=2)
    cluster.go.touch()
    profiler = cluster.profiler(num_shards=1)
    report = _report(profiler, profiler.create_profile(_REQUEST))
    profiler.close()
    assert (4, 3, 1, 0, 0) == (
        report.num_planned,
        report.num_measured,
        report.num_failed,
        report.num_skipped,
        report.num_flagged,
    )


def test_progress_counts_calls_and_shards(cluster: _Cluster) -> None:
    cluster.record("0/2", num_rows=4, num_planned=8)
    profiler = cluster.profiler()
    job = profiler.create_profile(_REQUEST)
    message = _wait_for_message(profiler, job, "2 running")
    assert "0 of 2 shards done" in message
    assert "4 of 8 calls" in message
    assert profiler.get_job(job.job_id).progress_ratio == pytest.approx(0.5)
    cluster.go.touch()
    _report(profiler, job)
    profiler.close()


def test_a_follower_that_was_lost_finds_its_job_again(cluster: _Cluster) -> None:
    """The Job outlives whoever asked for it, and the same profile is not submitted twice."""
    first = cluster.profiler()
    _wait_for_message(first, first.create_profile(_REQUEST), "2 running")
    first.close()
    assert set(cluster.controller.running()) == {0, 1}
    second = cluster.profiler()
    job = second.create_profile(_REQUEST)
    _wait_for_message(second, job, "2 running")
    cluster.go.touch()
    _report(second, job)
    # A third comes when all is over: it only collects.
    _report(second, second.create_profile(_REQUEST))
    second.close()
    assert cluster.server.requests.count(("create", "jobs")) == 1
    assert cluster.controller.num_started(name_of_job("short")) == 2


def test_two_that_submit_at_once_share_the_job(cluster: _Cluster) -> None:
    profilers = [cluster.profiler() for _ in range(3)]
    jobs = [profiler.create_profile(_REQUEST) for profiler in profilers]
    cluster.go.touch()
    reports = [_report(p, job) for p, job in zip(profilers, jobs, strict=True)]
    for profiler in profilers:
        profiler.close()
    assert {"short"} == {report.name for report in reports}
    assert cluster.controller.num_started(name_of_job("short")) == 2


def test_another_request_under_the_name_of_a_running_one_is_refused(cluster: _Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, job, "2 running")
    other = ProfileRequest(device="cpu", operators=("softmax",), name="short")
    with pytest.raises(InvalidRequestError, match="something else under this name"):
        _report(profiler, profiler.create_profile(other))
    cluster.go.touch()
    _report(profiler, job)
    # Once it is over, its place is free.
    _report(profiler, profiler.create_profile(other))
    profiler.close()


def test_cancelling_deletes_the_job_and_all_it_owns(cluster: _Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, job, "2 running")
    profiler.cancel_job(job.job_id)
    with pytest.raises(CancelledJobError):
        _report(profiler, job)
    profiler.close()
    _wait_until(lambda: {key[0] for key in cluster.server.store.objects} == {"nodes"})
    assert cluster.controller.running() == {}


def test_a_deleted_job_ends_the_following(cluster: _Cluster) -> None:
    profiler = cluster.profiler()
    job = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, job, "2 running")
    patch = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    cluster.server.store.change("jobs", name_of_job("short"), patch)
    with pytest.raises(InterruptedJobError, match="was deleted"):
        _report(profiler, job)
    profiler.close()


def test_a_failed_shard_is_named_with_its_last_words(cluster: _Cluster) -> None:
    """The others finish first; the same command then tries again."""
    text = "shard == 1 and sys.exit('no room for gemm')"
    cluster.controller.run_instead(cluster.program(text))
    profiler = cluster.profiler(retries_per_shard=1)
    with pytest.raises(InterruptedJobError) as caught:
        _report(profiler, profiler.create_profile(_REQUEST))
    assert "shard 1 ended with status 1" in caught.value.message
    assert "  no room for gemm" in caught.value.message
    assert "shard 0" not in caught.value.message
    assert cluster.controller.num_started(name_of_job("short")) == 3
    cluster.go.touch()
    cluster.controller.run_instead(cluster.program())
    assert "short" == _report(profiler, profiler.create_profile(_REQUEST)).name
    profiler.close()


def test_wrong_usage_is_not_tried_again(cluster: _Cluster) -> None:
    cluster.controller.run_instead(cluster.program("sys.exit(2)"))
    profiler = cluster.profiler(num_shards=1)
    with pytest.raises(InterruptedJobError, match="shard 0 ended with status 2"):
        _report(profiler, profiler.create_profile(_REQUEST))
    profiler.close()
    assert cluster.controller.num_started(name_of_job("short")) == 1


def test_what_keeps_pods_from_running_is_told(cluster: _Cluster) -> None:
    profiler = cluster.profiler(node_selector={"pool": "absent"})
    job = profiler.create_profile(_REQUEST)
    message = _wait_for_message(profiler, job, "has no node to run on")
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
def test_a_container_that_cannot_start_is_told(cluster: _Cluster, reason: str, told: str) -> None:
    cluster.controller.refuse_start = lambda _: {"reason": reason, "message": "secret not found"}
    profiler = cluster.profiler()
    job = profiler.create_profile(_REQUEST)
    assert "secret not found" in _wait_for_message(profiler, job, told)
    profiler.cancel_job(job.job_id)
    profiler.close()


def test_a_suspended_job_waits_for_its_queue(cluster: _Cluster) -> None:
    profiler = cluster.profiler(queue="gpus")
    job = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, job, "suspended until its queue has room")
    assert cluster.controller.running() == {}
    stored = cluster.server.store.get("jobs", name_of_job("short"))
    assert stored["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    cluster.go.touch()
    cluster.server.store.change("jobs", name_of_job("short"), {"spec": {"suspend": False}})
    assert "short" == _report(profiler, job).name
    profiler.close()


@pytest.mark.parametrize("failure", ["gone", "dropped", "away"])
def test_following_survives_the_api_server(cluster: _Cluster, failure: str) -> None:
    """Versions that are Gone, connections that break, answers of 503: the Job's end is seen."""
    profiler = cluster.profiler()
    job = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, job, "2 running")
    for _ in range(3):
        if failure == "gone":
            cluster.server.store.expire()
        elif failure == "dropped":
            cluster.server.store.drop_watches()
        else:
            cluster.server.num_outages = 2
            cluster.server.store.drop_watches()
        time.sleep(0.3)
    cluster.go.touch()
    assert "short" == _report(profiler, job).name
    profiler.close()
    assert cluster.server.requests.count(("create", "jobs")) == 1


def test_an_api_server_that_stays_away_is_told_in_the_end(cluster: _Cluster) -> None:
    profiler = cluster.profiler(lost_s_max=0.5)
    job = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, job, "2 running")
    cluster.server.num_outages = 1_000
    cluster.server.store.drop_watches()
    with pytest.raises(ServiceUnavailableError, match="goes on, and the same command follows"):
        _report(profiler, job)
    cluster.server.num_outages = 0
    profiler.close()


def test_a_profile_waits_for_the_pods_of_one_that_is_deleted(cluster: _Cluster) -> None:
    """Else the pods of both would measure the same for a while."""
    profiler = cluster.profiler()
    first = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, first, "2 running")
    profiler.cancel_job(first.job_id)
    second = profiler.create_profile(_REQUEST)
    _wait_for_message(profiler, second, "2 running")
    cluster.go.touch()
    assert "short" == _report(profiler, second).name
    assert profiler.get_job(first.job_id).state is JobState.CANCELLED
    profiler.close()


def test_devices_are_those_of_the_nodes(cluster: _Cluster) -> None:
    cluster.server.add_node("gpu-0", "NVIDIA-H200", 8)
    cluster.server.add_node("gpu-1", "NVIDIA-Unheard-Of", 8)
    profiler = cluster.profiler()
    assert ("cpu", "h200_sxm") == profiler.list_local_devices()
    with pytest.raises(DeviceNotPresentError, match=r"8 h200_sxm .*NVIDIA-Unheard-Of"):
        _report(profiler, profiler.create_profile(ProfileRequest(device="b200")))
    profiler.close()


def test_without_the_right_to_see_nodes_the_scheduler_tells(cluster: _Cluster) -> None:
    cluster.server.rules = [
        {"resources": ["jobs"], "verbs": ["create", "list", "watch", "delete"]},
        {"resources": ["configmaps"], "verbs": ["create", "patch"]},
        {"resources": ["pods"], "verbs": ["list"]},
    ]
    profiler = cluster.profiler()
    with pytest.raises(NotAllowedError, match="list nodes"):
        profiler.list_local_devices()
    job = profiler.create_profile(ProfileRequest(device="b200"))
    _wait_for_message(profiler, job, "has no node to run on")
    profiler.cancel_job(job.job_id)
    profiler.close()


def test_a_namespace_that_does_not_exist_is_told(cluster: _Cluster) -> None:
    """A server lists nothing there, and refuses what is created."""
    profiler = cluster.profiler(namespace="absent")
    with pytest.raises(InvalidRequestError, match=r'namespace.*"absent" not found'):
        _report(profiler, profiler.create_profile(_REQUEST))
    profiler.close()


def test_who_follows_a_job_changes_nothing_that_its_pods_read(cluster: _Cluster) -> None:
    """A pod that is tried again finds the configuration its Job was submitted with."""
    first, second = cluster.profiler(), cluster.profiler("another:50051")
    _wait_for_message(first, first.create_profile(_REQUEST), "2 running")
    before = cluster.server.store.get("configmaps", name_of_job("short"))
    job = second.create_profile(_REQUEST)
    _wait_for_message(second, job, "2 running")
    assert before == cluster.server.store.get("configmaps", name_of_job("short"))
    cluster.go.touch()
    _report(second, job)
    first.close()
    second.close()


def test_a_name_is_made_of_the_request() -> None:
    """The same request is the same profile, and one that measures again is a new one."""
    request = ProfileRequest(device="cpu", quick=True)
    assert name_request(request) == name_request(request)
    assert name_request(request).name != name_request(ProfileRequest(device="cpu")).name
    again = ProfileRequest(device="cpu", skip_covered=False)
    assert name_request(again).name != name_request(again).name


def _wait_until(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)
