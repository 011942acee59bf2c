"""The profiler behaves alike whether it is embedded or remote."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from contract_reach import Reach

from foretoken.catalog.service import CatalogService
from foretoken.client.facade import Foretoken
from foretoken.client.services import ProfilerClient
from foretoken.domain.errors import (
    CancelledJobError,
    DeviceNotPresentError,
    UnknownJobError,
    UnknownOperatorError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.profiling import ClosureRequest, GraphRequest, ProfileRequest
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import ProfilerPort
from foretoken.profiler import servicer
from foretoken.profiler.config import ProfilerConfig, TimerSpec
from foretoken.profiler.service import ProfilerService

# Not good timings, but timings.
_TIMER = TimerSpec(min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.001, case_s_max=0.005)
# Two batches of small calls: those of a sweep have inputs of many MB.
_CALLS = tuple(
    OperatorCall(
        operator="residual_add", dtype=DType.FP32, dims={"num_tokens": num_tokens, "hidden": 64}
    )
    for num_tokens in range(1, 6)
)
_REQUEST = ProfileRequest(device="cpu", calls=_CALLS, quick=True)


@pytest.fixture
def port(tmp_path: Path, catalog: CatalogService, reach: Reach) -> Iterator[ProfilerPort]:
    config = ProfilerConfig(
        state_folder=str(tmp_path / "p"),
        num_threads=1,
        batch_rows=4,
        quick_timer=_TIMER,
        # Rows are counted: a call that a busy machine disturbs leaves one each time it is timed.
        retime_ratio=0.0,
    )
    service = ProfilerService(config, catalog)
    service.open()
    yield reach(service, servicer.register, ProfilerClient.connect)
    service.close()


def test_the_cpu_is_a_device_of_every_machine(port: ProfilerPort) -> None:
    assert "cpu" in port.list_local_devices()


def test_a_profile_lands_in_the_catalog(catalog: CatalogService, port: ProfilerPort) -> None:
    """The report, the progress and the rows agree."""
    seen: list[Job] = []
    report = Foretoken(profiler=port).profile(_REQUEST, on_progress=seen.append)
    assert seen[-1].state is JobState.SUCCEEDED
    assert report.device == "cpu"
    assert report.num_measured > 0
    assert report.num_planned == report.num_measured + report.num_failed + report.num_skipped
    selection = MeasurementFilter(run_id=report.run_id, include_flagged=True)
    assert pa.table(catalog.read_measurements(selection)).num_rows == report.num_measured


def test_an_outline_says_what_a_profile_will_do(port: ProfilerPort) -> None:
    """As many calls as are then measured, and none once they are known."""
    outline = port.outline_profile(_REQUEST)
    report = Foretoken(profiler=port).profile(_REQUEST)
    assert (outline.num_calls, outline.name) == (report.num_planned, report.name)
    assert [entry.operator for entry in outline.operators] == ["residual_add"]
    again = port.outline_profile(_REQUEST)
    assert (again.num_calls, again.num_covered) == (0, outline.num_calls)


def test_calls_models_and_choices_reach_the_plan(port: ProfilerPort) -> None:
    request = ProfileRequest(device="cpu", quick=True, calls=_CALLS[:1], cache="both")
    assert port.outline_profile(request).num_calls == 2
    model = ProfileRequest(
        device="cpu", quick=True, models=(find_model("tiny-llama"),), tp_sizes=(1, 2)
    )
    one = replace(model, tp_sizes=(1,))
    assert port.outline_profile(model).num_calls > port.outline_profile(one).num_calls


def test_graphs_and_steps_of_an_absent_device_are_refused_at_once(port: ProfilerPort) -> None:
    graph = GraphRequest(device="gb200_nvl72", model="m", config_json="{}")
    with pytest.raises(DeviceNotPresentError, match="cpu"):
        port.create_graph_profile(graph)
    with pytest.raises(DeviceNotPresentError, match="cpu"):
        port.create_closure(ClosureRequest(device="gb200_nvl72", model="m", config_json="{}"))


def test_an_absent_device_is_refused_at_once(port: ProfilerPort) -> None:
    with pytest.raises(DeviceNotPresentError, match="cpu"):
        port.create_profile(ProfileRequest(device="gb200_nvl72"))


def test_an_unknown_operator_is_refused_at_once(port: ProfilerPort) -> None:
    with pytest.raises(UnknownOperatorError, match="gemm"):
        port.create_profile(ProfileRequest(device="cpu", operators=("gem",)))


def test_a_profile_can_be_cancelled(port: ProfilerPort) -> None:
    job = port.create_profile(ProfileRequest(device="cpu", quick=True))
    port.cancel_job(job.job_id)
    assert list(port.watch_job(job.job_id))[-1].state is JobState.CANCELLED
    with pytest.raises(CancelledJobError):
        port.get_profile_report(job.job_id)


def test_an_unknown_job_is_not_found(port: ProfilerPort) -> None:
    with pytest.raises(UnknownJobError):
        port.get_profile_report("nobody")
