"""A cluster for tests of profiles: an API server, what makes its pods, and a catalog."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes_jobs import JobController
from kubernetes_server import KubernetesServer

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.measurements.profiling import ProfileOutline, ProfileReport, ProfileRequest
from foretoken.jobs.sharing import SharedJobs
from foretoken.profiler.cluster.service import ClusterProfiler
from foretoken.profiler.cluster.spec import KubernetesSpec, PodSetup
from foretoken.wire.arrow import rows_to_table

REQUEST = ProfileRequest(device="cpu", operators=("gemm",), name="short")
# A shard that ends well as soon as there is a file `go`.
_WAITS = "while not pathlib.Path({go!r}).exists(): time.sleep(0.01)"
_SHARD = "os.environ['FORETOKEN_PROFILER__SHARD_INDEX']"


class Cluster:
    """An API server, its controller, and a catalog; profilers connect to them."""

    def __init__(self, folder: Path, catalog_path: str) -> None:
        self.folder = folder
        self.go = folder / "go"
        config = CatalogConfig(path=catalog_path, num_threads=1, state_folder=str(folder / "state"))
        self.catalog = CatalogService(config)
        self.server = KubernetesServer()
        self.controller = JobController(self.server, folder / "pods", program=self.program())

    @classmethod
    @contextmanager
    def running(cls, folder: Path, catalog_path: str) -> "Iterator[Cluster]":
        """Yield a cluster with one node, whose controller runs."""
        cluster = cls(folder, catalog_path)
        cluster.server.add_node("worker")
        cluster.catalog.open()
        with cluster.server, cluster.controller:
            yield cluster
        cluster.catalog.close()

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

    def profiler(
        self,
        address: str = "catalog:50051",
        credentials: Mapping[str, bytes] | None = None,
        **settings: object,
    ) -> ClusterProfiler:
        """Return an open profiler with files of its own, as another process would have."""
        settings = {"num_shards": 2, "follow_s": 1, **settings}
        kubeconfig = str(self.server.write_kubeconfig(self.folder))
        spec = KubernetesSpec(kubeconfig=kubeconfig, **settings)  # type: ignore[arg-type]
        setup = PodSetup(catalog=address, credentials=credentials or {})
        home = self.folder / f"home-{time.monotonic_ns()}"
        sharing = None
        if spec.shares_jobs:
            sharing = SharedJobs(self.catalog, "profiler", lease_s=spec.job_lease_s, period_s=0.05)
        profiler = ClusterProfiler(spec, setup, self.catalog, home, _outline, sharing)
        profiler.open()
        return profiler

    def finish(self, *shards: str) -> None:
        """Let the pods end well, of shards that record that nothing was left to time."""
        for shard in shards or ("0/2", "1/2"):
            self.record(shard, num_rows=0, num_planned=0)
        self.go.touch()

    def record(
        self,
        shard: str,
        num_rows: int,
        num_planned: int,
        *,
        num_doubted: int = 0,
        num_skipped: int = 0,
    ) -> None:
        """Record what a shard would; the first `num_doubted` timed rows are flagged."""
        environment = {
            "profile": "short",
            "shard": shard,
            "num_planned": str(num_planned),
            "num_skipped": str(num_skipped),
        }
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


def wait_for_message(profiler: ClusterProfiler, job: Job, text: str) -> str:
    for state in profiler.watch_job(job.job_id):
        if text in state.message:
            return state.message
    pytest.fail(f"never said {text!r}, but {profiler.get_job(job.job_id)}")


def report_of(profiler: ClusterProfiler, job: Job) -> ProfileReport:
    assert list(profiler.watch_job(job.job_id))[-1].state.is_final
    return profiler.get_profile_report(job.job_id)


def wait_until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)
