"""Controllers of profiles are killed in the middle: others go on with the Jobs that are there."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_jobs import JobController
from kubernetes_server import KubernetesServer
from pods import Pods
from service_fleet import Fleet, free_port, play_with_kills

from foretoken.app.serve import serve_catalog_at
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.services import ProfilerClient
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.wire.arrow import rows_to_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_NUM_SHARDS = 2
_NUM_ROWS = 3
# How long a shard measures, in s: long enough for a controller to be killed meanwhile.
_SHARD_S = 2.0


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=str(tmp_path / "catalog.duckdb"), num_threads=1))
    service.open()
    yield service
    service.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    """A cluster of one node, whose pods measure for some seconds and end well."""
    server = KubernetesServer()
    server.add_node("worker")
    program = [sys.executable, "-I", "-S", "-c", f"import time; time.sleep({_SHARD_S})"]
    with server, JobController(server, tmp_path / "pods", program=program):
        yield server


def _record_shards(catalog: CatalogService, name: str) -> None:
    """Record what the shards of a profile would, whose programs are none of ours here."""
    rows = [
        {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "fp32",
            "dims": {"m": 1 + index, "n": 64, "k": 64},
            "device": "cpu",
            "latency_us_median": 10.0 + index,
            "status": "ok",
        }
        for index in range(_NUM_ROWS)
    ]
    for shard in range(_NUM_SHARDS):
        run = Run(
            run_id=f"{name}-{shard}",
            kind=RunKind.PROFILE,
            tool="tests",
            environment={
                "profile": name,
                "shard": f"{shard}/{_NUM_SHARDS}",
                "num_planned": str(_NUM_ROWS),
            },
        )
        batch = MeasurementBatch(batch_index=0, rows=rows_to_table(rows), is_last=True)
        list(catalog.record(run, [batch]))


def test_profiles_outlive_their_controllers(
    tmp_path: Path, catalog: CatalogService, server: KubernetesServer
) -> None:
    """Each has one Job in the cluster, its pods run once, and one report of all shards."""
    address = f"127.0.0.1:{free_port()}"
    kubernetes = {
        "kubeconfig": str(server.write_kubeconfig(tmp_path)),
        "num_shards": _NUM_SHARDS,
        "follow_s": 1,
        "shares_jobs": True,
        "job_lease_s": 1.5,
    }
    section = {"place": "kubernetes", "kubernetes": kubernetes}
    names: list[str] = []
    with (
        serve_catalog_at(address, catalog, grace_s=1.0),
        Pods() as pods,
        Fleet(pods, tmp_path, "profiler", address, section) as fleet,
        ProfilerClient.connect(fleet.options) as client,
    ):

        def create(number: int) -> Job:
            names.append(f"profile-{number}")
            _record_shards(catalog, names[-1])
            request = ProfileRequest(device="cpu", operators=("gemm",), name=names[-1])
            return client.create_profile(request)

        def check(job: Job) -> None:
            report = client.get_profile_report(job.job_id)
            expected = _NUM_SHARDS * _NUM_ROWS
            assert (expected, expected) == (report.num_planned, report.num_measured)

        play_with_kills(fleet, catalog, client, create, check)
    jobs = server.store.list("jobs", lambda _: True)
    assert len(names) == len(jobs) == server.requests.count(("create", "jobs"))
    assert {(_NUM_SHARDS, 0)} == {
        (job["status"]["succeeded"], job["status"].get("failed", 0)) for job in jobs
    }
