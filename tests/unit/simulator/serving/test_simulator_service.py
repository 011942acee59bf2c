import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving_fakes import RooflinePredictor, build_scenario, plain_engine
from simulator_services import open_simulator

from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownJobError,
    UnknownOperatorError,
    UnknownPluginError,
    UnknownTopologyError,
)
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.job import JobState
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.cost.latency_surfaces import surface_spec
from foretoken.simulator.cost.surface_cache import SurfaceCache
from foretoken.simulator.service import SimulatorService

_SCENARIO = build_scenario(workload=WorkloadSpec(num_requests=5))


def _version(name: str) -> ModelVersion:
    return ModelVersion(version=name, created_at="", snapshot_hash="", num_rows=1, is_active=True)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SimulatorService]:
    simulator = open_simulator(tmp_path / "state", RooflinePredictor())
    yield simulator
    simulator.close()


def test_a_serving_simulation_is_a_job_with_a_report(service: SimulatorService) -> None:
    job = service.create_serving_simulation(_SCENARIO)
    states = list(service.watch_job(job.job_id))
    assert states[-1].state is JobState.SUCCEEDED
    report = service.get_serving_report(job.job_id)
    assert (report.num_completed, len(report.requests.arrival_s)) == (5, 5)
    assert service.list_jobs() == (service.get_job(job.job_id),)
    assert service.cancel_job(job.job_id).state is JobState.SUCCEEDED


def test_a_training_simulation_is_a_job_with_a_report(service: SimulatorService) -> None:
    scenario = TrainingScenario(
        model=find_model("qwen2-0.5b"), device="a100_sxm_80", sequence_length=512
    )
    job = service.create_training_simulation(scenario)
    assert list(service.watch_job(job.job_id))[-1].state is JobState.SUCCEEDED
    assert service.get_training_report(job.job_id).step_time_ms > 0


def test_a_simulation_that_was_cancelled_is_asked_again(service: SimulatorService) -> None:
    endless = replace(_SCENARIO, workload=replace(_SCENARIO.workload, num_requests=10**6))
    job = service.create_serving_simulation(endless)
    service.cancel_job(job.job_id)
    assert list(service.watch_job(job.job_id))[-1].state is JobState.CANCELLED
    again = service.resume_job(job.job_id)
    assert (job.kind, True) == (again.kind, again.job_id != job.job_id)
    service.cancel_job(again.job_id)
    assert list(service.watch_job(again.job_id))[-1].state is JobState.CANCELLED


def test_a_report_outlives_the_service(tmp_path: Path) -> None:
    first = open_simulator(tmp_path, RooflinePredictor())
    job = first.create_serving_simulation(_SCENARIO)
    list(first.watch_job(job.job_id))
    report = first.get_serving_report(job.job_id)
    first.close()
    second = open_simulator(tmp_path, RooflinePredictor())
    assert second.get_serving_report(job.job_id) == report
    second.close()


def test_what_can_never_work_is_refused_at_once(service: SimulatorService) -> None:
    with pytest.raises(UnknownDeviceError):
        service.create_serving_simulation(build_scenario(device="a31"))
    with pytest.raises(UnknownTopologyError):
        service.create_serving_simulation(build_scenario(topology="ring"))
    with pytest.raises(UnknownPluginError):
        service.create_serving_simulation(build_scenario(engine=EngineSpec(profile="fifo")))
    with pytest.raises(UnknownOperatorError, match="'attention'"):
        service.create_serving_simulation(build_scenario(kernels={"attention": "flashinfer"}))
    with pytest.raises(InvalidRequestError, match=r"engine\.rules\.block_size"):
        service.create_serving_simulation(
            build_scenario(engine=plain_engine(rules={"block_size": "0"}))
        )
    with pytest.raises(UnknownJobError):
        service.get_job("serving-none")


def test_what_cannot_run_has_a_reason_and_no_tables(service: SimulatorService) -> None:
    job = service.create_serving_simulation(build_scenario(model=find_model("llama-2-70b")))
    assert JobState.SUCCEEDED is list(service.watch_job(job.job_id))[-1].state
    assert not service.get_serving_report(job.job_id).feasibility.is_feasible
    with pytest.raises(InvalidRequestError, match="cannot run"):
        service.read_serving_table(job.job_id, "steps")


def test_surfaces_are_kept_by_model_version() -> None:
    predictor = RooflinePredictor((_version("one"),))
    cache = SurfaceCache(predictor, max_surfaces=2)
    spec = surface_spec(_SCENARIO, 100)
    assert cache.get(spec) is cache.get(spec)
    predictor.versions = (_version("two"),)
    assert cache.get(spec).model_version == "two"
    assert len(predictor.queries) == 2


def test_the_least_used_surfaces_go_first() -> None:
    predictor = RooflinePredictor((_version("one"),))
    cache = SurfaceCache(predictor, max_surfaces=2)
    specs = [surface_spec(_SCENARIO, context) for context in (10, 100, 1000)]
    for index in (0, 1, 0, 2, 0):
        cache.get(specs[index])
    assert len(predictor.queries) == 3
    cache.get(specs[1])
    assert len(predictor.queries) == 4


@pytest.mark.parametrize(("versions", "correction"), [((), ""), (("one",), "measured")])
def test_answers_that_may_change_under_their_name_are_not_kept(
    versions: tuple[str, ...], correction: str
) -> None:
    """Those of a predictor without a model, and those that a correction changes."""
    predictor = RooflinePredictor(tuple(map(_version, versions)))
    cache = SurfaceCache(predictor, max_surfaces=2)
    for _ in range(2):
        cache.get(surface_spec(replace(_SCENARIO, correction=correction), 100))
    assert len(predictor.queries) == 2


@pytest.mark.parametrize(("correction", "num_queries"), [("", 1), ("measured", 2)])
def test_an_answer_just_had_says_which_surfaces_to_find(correction: str, num_queries: int) -> None:
    """Also of a predictor without an active model; not of what a correction changes."""
    predictor = RooflinePredictor((_version("one"),))
    cache = SurfaceCache(predictor, max_surfaces=2)
    spec = surface_spec(replace(_SCENARIO, correction=correction), 100)
    cache.get(spec, "one")
    predictor.versions = (replace(_version("one"), is_active=False),)
    cache.get(spec, "one")
    assert num_queries == len(predictor.queries)
    cache.get(spec, "two")
    assert num_queries + 1 == len(predictor.queries)


def test_a_service_that_compiles_at_its_start_answers_meanwhile(tmp_path: Path) -> None:
    service = open_simulator(tmp_path, RooflinePredictor(), compiles_at_start=True)
    job = service.create_serving_simulation(_SCENARIO)
    assert JobState.SUCCEEDED is list(service.watch_job(job.job_id))[-1].state
    service.close()
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()
