"""The profiler as its port shows it: a real, tiny profile of this CPU."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest
import torch
from profiler_fakes import FakeCatalog

from foretoken.domain.errors import (
    DeviceNotPresentError,
    InvalidRequestError,
    UnknownJobError,
    UnknownOperatorError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.ports import ProfileRequest
from foretoken.domain.report import ProfileReport
from foretoken.profiler.config import ProfilerConfig, TimerSpec
from foretoken.profiler.service import ProfilerService

FAST = TimerSpec(
    min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.002, case_s_max=0.005, max_input_sets=2
)
SMALL = ProfileRequest(device="cpu", quick=True, operators=("residual_add", "kv_cache_write"))


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


@pytest.fixture
def profiler(tmp_path: Path, catalog: FakeCatalog) -> Iterator[ProfilerService]:
    config = ProfilerConfig(state_folder=str(tmp_path), quick_timer=FAST, num_threads=1)
    service = ProfilerService(config, catalog)
    service.open()
    yield service
    service.close()


def finish(profiler: ProfilerService, job: Job) -> ProfileReport:
    *_, last = profiler.watch_job(job.job_id)
    assert (last.state, last.error_message) == (JobState.SUCCEEDED, "")
    return profiler.get_profile_report(job.job_id)


def test_cpu_is_always_present(profiler: ProfilerService) -> None:
    assert profiler.list_local_devices()[0] == "cpu"


def test_device_that_is_not_here_is_refused_with_what_is(profiler: ProfilerService) -> None:
    with pytest.raises(DeviceNotPresentError, match="it has cpu"):
        profiler.create_profile(ProfileRequest(device="no_such_gpu"))


def test_request_is_checked_before_a_job_starts(profiler: ProfilerService) -> None:
    with pytest.raises(UnknownOperatorError):
        profiler.create_profile(ProfileRequest(device="cpu", operators=("gemmm",)))
    assert profiler.list_jobs() == ()


def test_profile_measures_every_point_and_then_none(
    profiler: ProfilerService, catalog: FakeCatalog
) -> None:
    """The second profile finds all points covered, and takes no time for them."""
    first = finish(profiler, profiler.create_profile(SMALL))
    table = catalog.table
    assert first.num_measured == table.num_rows == first.num_planned > 10
    assert (first.num_failed, first.num_skipped) == (0, 0)
    assert set(table.column("operator").to_pylist()) == set(SMALL.operators)
    assert set(table.column("status").to_pylist()) == {"ok"}
    assert pc.min(table.column("latency_us_median")).as_py() > 0.0
    assert catalog.completed == {first.run_id}
    second = finish(profiler, profiler.create_profile(SMALL))
    assert (second.num_measured, second.num_skipped) == (0, second.num_planned)
    assert catalog.table.num_rows == first.num_measured


def test_run_says_what_it_was_measured_on(profiler: ProfilerService, catalog: FakeCatalog) -> None:
    request = ProfileRequest(device="cpu", quick=True, operators=("adam",), time_cap_s=1e-9)
    report = finish(profiler, profiler.create_profile(request))
    environment = catalog.runs[report.run_id].environment
    assert environment["framework_version"] == torch.__version__
    assert environment["num_threads"] == "1"
    assert environment["cpu"]
    assert float(environment["self_test_gemm_flops_per_s"]) > 1e8
    assert report.num_skipped == report.num_planned > 0


def test_cancelled_profile_has_no_report(profiler: ProfilerService) -> None:
    job = profiler.create_profile(ProfileRequest(device="cpu", quick=True, operators=("gemm",)))
    profiler.cancel_job(job.job_id)
    *_, last = profiler.watch_job(job.job_id)
    assert last.state is JobState.CANCELLED


def test_unknown_job_is_refused(profiler: ProfilerService) -> None:
    with pytest.raises(UnknownJobError):
        profiler.get_profile_report("profile-none")


def test_share_that_does_not_exist_fails_the_job(tmp_path: Path, catalog: FakeCatalog) -> None:
    config = ProfilerConfig(state_folder=str(tmp_path), shard_index=3, num_shards=2)
    service = ProfilerService(config, catalog)
    service.open()
    job = service.create_profile(SMALL)
    *_, last = service.watch_job(job.job_id)
    assert last.error_reason == InvalidRequestError.reason
    service.close()
