"""The profiler as its port shows it: a real, tiny profile of this CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest
import torch
from profiler_fakes import FAST, FakeCatalog, spooled_rows

from foretoken.domain.errors import (
    DeviceNotPresentError,
    InvalidRequestError,
    ServiceUnavailableError,
    UnknownDeviceError,
    UnknownJobError,
    UnknownOperatorError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.profiling import ProfileReport, ProfileRequest
from foretoken.domain.models.architecture import find_model
from foretoken.domain.name import is_name
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.config import ProfilerConfig
from foretoken.profiler.service import ProfilerService

SMALL = ProfileRequest(device="cpu", quick=True, operators=("residual_add", "kv_cache_write"))


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


@pytest.fixture
def profiler(tmp_path: Path, catalog: FakeCatalog) -> Iterator[ProfilerService]:
    config = ProfilerConfig(
        state_folder=str(tmp_path),
        quick_timer=FAST,
        num_threads=1,
        # Rows are counted: a call that a busy machine disturbs leaves one each time it is timed.
        retime_ratio=0.0,
    )
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


@pytest.mark.parametrize("name", ["x/../../..", "/abs", ".hidden", "a b", "x" * 129])
def test_a_profile_whose_name_is_none_is_refused_at_once(
    profiler: ProfilerService, name: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    for ask in (profiler.create_profile, profiler.outline_profile):
        with pytest.raises(InvalidRequestError, match=r"name: .* is no name"):
            ask(replace(SMALL, name=name))
    assert before == sorted(tmp_path.rglob("*"))


def test_the_longest_name_of_a_profile_is_recorded(profiler: ProfilerService) -> None:
    request = ProfileRequest(
        device="cpu", quick=True, operators=("residual_add",), name="n" * 128, time_cap_s=1e-3
    )
    report = finish(profiler, profiler.create_profile(request))
    assert "n" * 128 == report.name
    assert is_name(report.run_id)


def test_calls_asked_for_by_name_are_planned_also_where_a_quick_sweep_would_not(
    profiler: ProfilerService,
) -> None:
    """The update of 20 million parameters takes longer than a call of a quick sweep may."""
    call = OperatorCall(
        operator="fused_adam",
        dtype=DType.FP32,
        dims={**dict.fromkeys(find_operator("fused_adam").dim_names, 1), "num_params": 20_000_000},
    )
    outline = profiler.outline_profile(ProfileRequest(device="cpu", quick=True, calls=(call,)))
    assert (1, 0) == (outline.num_calls, outline.num_too_long)


def test_request_is_checked_before_a_job_starts(profiler: ProfilerService) -> None:
    with pytest.raises(UnknownOperatorError):
        profiler.create_profile(ProfileRequest(device="cpu", operators=("gemmm",)))
    assert profiler.list_jobs() == ()


def test_profile_measures_every_point_and_then_none(
    profiler: ProfilerService, catalog: FakeCatalog
) -> None:
    """The second profile finds all points known, and takes no time for them."""
    outline = profiler.outline_profile(SMALL)
    first = finish(profiler, profiler.create_profile(SMALL))
    table = catalog.table
    assert outline.num_calls == first.num_planned
    assert first.num_measured == table.num_rows == first.num_planned > 10
    assert (first.num_failed, first.num_skipped) == (0, 0)
    assert set(table.column("operator").to_pylist()) == set(SMALL.operators)
    assert set(table.column("status").to_pylist()) == {"ok"}
    assert pc.min(table.column("latency_us_median")).as_py() > 0.0
    assert catalog.completed == {first.run_id}
    assert first.name == outline.name == catalog.runs[first.run_id].environment["profile"]
    second = finish(profiler, profiler.create_profile(SMALL))
    assert (second.num_measured, second.num_skipped) == (0, second.num_planned)
    assert catalog.table.num_rows == first.num_measured
    assert profiler.outline_profile(SMALL).num_calls == 0


def test_a_profile_with_nothing_to_time_leaves_a_run_without_rows_once(
    tmp_path: Path, catalog: FakeCatalog
) -> None:
    """Else who waits for it cannot know it from one that never ran."""
    config = ProfilerConfig(state_folder=str(tmp_path), quick_call_s_max=1e-12, num_threads=1)
    profiler = ProfilerService(config, catalog)
    profiler.open()
    for _ in range(2):
        report = finish(profiler, profiler.create_profile(replace(SMALL, name="short")))
        assert ("", 0) == (report.run_id, report.num_measured)
    profiler.close()
    (run,) = catalog.runs.values()
    assert catalog.completed == {run.run_id}
    assert report.num_skipped > 10
    assert ("short", "0/1", "0", str(report.num_skipped)) == tuple(
        run.environment[key] for key in ("profile", "shard", "num_planned", "num_skipped")
    )


def test_report_is_complete(profiler: ProfilerService) -> None:
    report = finish(profiler, profiler.create_profile(SMALL))
    assert [entry.operator for entry in report.operators] == sorted(SMALL.operators)
    assert sum(entry.num_measured for entry in report.operators) == report.num_measured
    assert 0.0 < sum(entry.wall_s for entry in report.operators) < report.wall_s
    assert report.num_repeats > 0
    assert 0.0 <= report.repeat_median_ratio <= report.repeat_p90_ratio


def test_interrupted_profile_goes_on_where_it_stopped(
    profiler: ProfilerService, catalog: FakeCatalog
) -> None:
    """Both parts together are the plan: nothing twice, repeats included.

    Where it stops is a matter of how busy the machine is, at worst before the first call.
    """
    capped = replace(SMALL, time_cap_s=0.05)
    first = finish(profiler, profiler.create_profile(capped))
    second = finish(profiler, profiler.create_profile(SMALL))
    assert second.num_measured == first.num_planned - first.num_measured
    assert catalog.table.num_rows == first.num_planned


def test_measuring_again_takes_every_point_once_more_and_can_be_resumed(
    profiler: ProfilerService,
) -> None:
    first = finish(profiler, profiler.create_profile(SMALL))
    again = replace(SMALL, skip_covered=False, name="again")
    second = finish(profiler, profiler.create_profile(again))
    assert second.num_measured == first.num_measured
    third = finish(profiler, profiler.create_profile(again))
    assert (third.num_measured, third.num_skipped) == (0, first.num_measured)


def test_rows_the_catalog_had_not_are_recorded_at_the_next_start(
    tmp_path: Path, catalog: FakeCatalog
) -> None:
    """A catalog that is gone costs no measurement, and none is taken twice."""
    config = ProfilerConfig(
        state_folder=str(tmp_path),
        quick_timer=FAST,
        num_threads=1,
        batch_rows=5,
        receipt_s=0.01,
        catalog_s=0.2,
        retime_ratio=0.0,
    )
    service = ProfilerService(config, catalog)
    service.open()
    catalog.errors = [ServiceUnavailableError("gone")] * 100_000
    job = service.create_profile(SMALL)
    *_, last = service.watch_job(job.job_id)
    assert (last.state, last.error_reason) == (JobState.FAILED, "SERVICE_UNAVAILABLE")
    assert catalog.table.num_rows == 0
    waiting = spooled_rows(tmp_path / "spool")
    catalog.errors = []
    report = finish(service, service.create_profile(SMALL))
    service.close()
    assert (report.num_measured, report.num_skipped) == (0, waiting)
    assert catalog.table.num_rows == waiting > 10
    assert spooled_rows(tmp_path / "spool") == 0


def test_device_that_is_not_here_can_be_planned_for(profiler: ProfilerService) -> None:
    request = ProfileRequest(device="h200_sxm", models=(find_model("tiny-llama"),))
    outline = profiler.outline_profile(request)
    assert outline.device == "h200_sxm"
    assert outline.num_calls > 100
    assert outline.estimated_s > 0.0


def test_device_nobody_knows_cannot_be_planned_for(profiler: ProfilerService) -> None:
    with pytest.raises(UnknownDeviceError):
        profiler.outline_profile(ProfileRequest(device="no_such_gpu"))


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
