"""Searches as jobs of the simulator: checked at once, watched from any place, taken up again."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving_fakes import RooflinePredictor, build_scenario, plain_engine
from simulator_services import open_simulator

from foretoken.domain.errors import (
    InvalidRequestError,
    JobNotFinishedError,
    SearchTooLargeError,
    UnknownDeviceError,
    UnknownJobError,
    UnknownPluginError,
)
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.job import JobState
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.requests.cluster import AutoscalingSpec, ClusterSpec, ReplicaPool, RoutingSpec
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CapacityRequest,
    LatencyLimit,
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
    ServingTargets,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.service import SimulatorService

_SCENARIO = build_scenario(workload=WorkloadSpec(num_requests=40, rate_rps=2.0))
_TARGETS = ServingTargets(limits=(LatencyLimit(metric="ttft_ms", percentile=99, limit_ms=2000),))
_REQUEST = ServingSearchRequest(
    scenario=_SCENARIO, space=ServingSpace(max_devices=2), targets=_TARGETS, num_finalists=3
)


def _open(folder: Path, **settings: int | bool | str) -> SimulatorService:
    return open_simulator(folder, RooflinePredictor(), **settings)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatorService]:
    """One service for all tests, for its workers take a while to start."""
    service = _open(tmp_path_factory.mktemp("service"))
    yield service
    service.close()


def _search(service: SimulatorService, request: ServingSearchRequest) -> ServingSearchReport:
    job = service.create_serving_search(request)
    last = list(service.watch_job(job.job_id))[-1]
    assert JobState.SUCCEEDED is last.state, last.error_message
    return service.get_serving_search_report(job.job_id)


def _without_times(report: ServingSearchReport) -> ServingSearchReport:
    return replace(report, job_id="", cpu_s=0.0, wall_s=0.0)


def test_a_serving_search_is_a_job_with_its_candidates(service: SimulatorService) -> None:
    report = _search(service, _REQUEST)
    assert report.num_evaluated > 0
    assert 1 == report.num_workers
    table = service.read_serving_search_table(report.job_id, "candidates").read_all()
    assert table["name"].to_pylist() == list(report.candidates.name)
    assert report.best == report.candidates.name[0]
    with pytest.raises(InvalidRequestError, match="candidates"):
        service.read_serving_search_table(report.job_id, "requests")


def test_what_was_warmed_up_asks_the_predictor_less_and_is_no_job(tmp_path: Path) -> None:
    calls: list[int] = []
    for is_warm in (False, True):
        service, predictor = _open_trained(tmp_path / str(is_warm))
        if is_warm:
            service.warm_up(_REQUEST)
        assert () == tuple(service.list_jobs())
        calls.append(_count_calls(service, predictor, replace(_REQUEST, num_finalists=0)))
        service.close()
    assert calls[1] < calls[0]


@pytest.mark.slow
def test_what_a_correction_changes_is_asked_by_every_search(tmp_path: Path) -> None:
    """Another may have been learned under its name; what else was answered is kept."""
    service, predictor = _open_trained(tmp_path)
    corrected = replace(_REQUEST, scenario=replace(_REQUEST.scenario, correction="measured"))
    plain = [_count_calls(service, predictor, _REQUEST) for _ in range(2)]
    assert plain[1] < plain[0]
    first, second = (_count_calls(service, predictor, corrected) for _ in range(2))
    assert plain[0] <= first == second
    service.close()


def _open_trained(folder: Path) -> tuple[SimulatorService, RooflinePredictor]:
    version = ModelVersion(
        version="roofline", created_at="", snapshot_hash="", num_rows=1, is_active=True
    )
    predictor = RooflinePredictor((version,))
    return open_simulator(folder, predictor), predictor


def _count_calls(
    service: SimulatorService, predictor: RooflinePredictor, request: ServingSearchRequest
) -> int:
    before = len(predictor.queries)
    _search(service, request)
    return len(predictor.queries) - before


def test_a_question_that_is_refused_is_refused_in_a_warm_up(service: SimulatorService) -> None:
    with pytest.raises(UnknownDeviceError):
        service.warm_up(replace(_REQUEST, space=ServingSpace(max_devices=2, devices=("none",))))


def test_finalists_can_be_watched_from_any_place_and_afterwards(service: SimulatorService) -> None:
    job = service.create_serving_search(_REQUEST)
    found = list(service.watch_serving_search(job.job_id))
    report = service.get_serving_search_report(job.job_id)
    assert report.num_simulated == len(found) == len(report.finalists) > 0
    assert {finalist.candidate for finalist in report.finalists} == {f.candidate for f in found}
    assert found[1:] == list(service.watch_serving_search(job.job_id, 1))
    assert [] == list(service.watch_serving_search(job.job_id, len(found)))
    with pytest.raises(InvalidRequestError, match="first"):
        list(service.watch_serving_search(job.job_id, -1))
    with pytest.raises(UnknownJobError):
        list(service.watch_serving_search("serving-search-none"))


def test_finalists_may_have_longer_requests_than_the_workload(service: SimulatorService) -> None:
    """They are simulated under more requests, among which longer ones are drawn."""
    lengths = LengthSpec(kind="lognormal", mean=100, spread=1.5, maximum=1500)
    workload = WorkloadSpec(num_requests=3, rate_rps=2.0, prefill=lengths, decode=lengths)
    scenario = replace(_SCENARIO, workload=workload)
    report = _search(service, replace(_REQUEST, scenario=scenario, num_finalists=1))
    assert report.num_simulated == len(report.finalists) > 0


@pytest.mark.slow
def test_the_same_search_gives_the_same_report(service: SimulatorService, tmp_path: Path) -> None:
    """Also in a service whose workers are two."""
    other = _open(tmp_path / "other", num_search_workers=2)
    first, second = _search(service, _REQUEST), _search(other, _REQUEST)
    other.close()
    assert (1, 2) == (first.num_workers, second.num_workers)
    assert _without_times(first) == replace(_without_times(second), num_workers=1)


def test_a_capacity_search_is_a_job_with_a_report(service: SimulatorService) -> None:
    request = CapacityRequest(scenario=_SCENARIO, targets=_TARGETS, tolerance_ratio=0.2)
    job = service.create_capacity_search(request)
    assert JobState.SUCCEEDED is list(service.watch_job(job.job_id))[-1].state
    report = service.get_capacity_report(job.job_id)
    assert job.job_id == report.job_id
    assert report.capacity_rps > 0
    with pytest.raises(InvalidRequestError, match="not a serving search"):
        list(service.watch_serving_search(job.job_id))


def test_a_search_that_is_too_large_never_becomes_a_job(tmp_path: Path) -> None:
    """Refused with the setting that would allow it."""
    service = _open(tmp_path, max_search_points=3, max_finalists=2)
    with pytest.raises(SearchTooLargeError, match=r"3 finalists .* simulator\.max_finalists"):
        service.create_serving_search(_REQUEST)
    with pytest.raises(SearchTooLargeError, match=r"simulator\.max_search_points") as caught:
        service.create_serving_search(replace(_REQUEST, num_finalists=0))
    assert "3" == caught.value.details["limit"]
    assert () == service.list_jobs()
    service.close()


def _in_pools(pool: ReplicaPool, router: str = "round_robin") -> ServingScenario:
    cluster = ClusterSpec(pools=(pool,), routing=RoutingSpec(router=router))
    return replace(_SCENARIO, cluster=cluster)


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        (build_scenario(device="a31"), UnknownDeviceError),
        (build_scenario(engine=EngineSpec(profile="fifo")), UnknownPluginError),
        (build_scenario(quantization="fp9"), UnknownPluginError),
        (build_scenario(engine=plain_engine(rules={"block_size": "0"})), InvalidRequestError),
        (_in_pools(ReplicaPool(name="a"), router="lottery"), UnknownPluginError),
        (_in_pools(ReplicaPool(name="a", device="a31")), UnknownDeviceError),
        (
            _in_pools(ReplicaPool(name="a", autoscaling=AutoscalingSpec(policy="lottery"))),
            UnknownPluginError,
        ),
    ],
    ids=["device", "engine", "quantization", "rule", "router", "pool", "autoscaler"],
)
def test_a_scenario_that_cannot_be_is_refused_at_once(
    scenario: ServingScenario, error: type[Exception], service: SimulatorService
) -> None:
    """Of a simulation and of both searches."""
    before = service.list_jobs()
    with pytest.raises(error):
        service.create_serving_simulation(scenario)
    with pytest.raises(error):
        service.create_capacity_search(CapacityRequest(scenario=scenario, targets=_TARGETS))
    with pytest.raises(error):
        service.create_serving_search(replace(_REQUEST, scenario=scenario))
    assert before == service.list_jobs()


@pytest.mark.parametrize(
    ("space", "error"),
    [
        (ServingSpace(devices=("a31",)), UnknownDeviceError),
        (ServingSpace(profiles=("fifo",)), UnknownPluginError),
        (ServingSpace(routers=("lottery",)), UnknownPluginError),
        (ServingSpace(quantizations=("", "fp9")), UnknownPluginError),
    ],
    ids=["device", "engine", "router", "quantization"],
)
def test_a_space_of_what_there_is_not_is_refused_at_once(
    space: ServingSpace, error: type[Exception], service: SimulatorService
) -> None:
    with pytest.raises(error):
        service.create_serving_search(replace(_REQUEST, space=space))


@pytest.mark.slow
def test_a_search_that_was_left_goes_on_with_the_next_service(tmp_path: Path) -> None:
    """Under its name, with the report of one that was never left."""
    first = _open(tmp_path)
    job = first.create_serving_search(_REQUEST)
    first.close()
    second = _open(tmp_path, resumes_at_start=True)
    assert JobState.SUCCEEDED is list(second.watch_job(job.job_id))[-1].state
    found = second.get_serving_search_report(job.job_id)
    assert _without_times(_search(second, _REQUEST)) == _without_times(found)
    second.close()


def test_a_result_that_is_not_there_yet_is_an_error(service: SimulatorService) -> None:
    job = service.create_serving_search(_REQUEST)
    service.cancel_job(job.job_id)
    last = list(service.watch_job(job.job_id))[-1]
    assert last.state in (JobState.CANCELLED, JobState.SUCCEEDED)
    other = service.create_serving_search(replace(_REQUEST, num_finalists=2))
    with pytest.raises(JobNotFinishedError):
        service.get_serving_search_report(other.job_id)
    list(service.watch_job(other.job_id))


def test_a_search_that_was_cancelled_is_resumed_as_a_new_job(service: SimulatorService) -> None:
    """Of the same question; one that has its answer is left as it is."""
    job = service.create_serving_search(_REQUEST)
    service.cancel_job(job.job_id)
    cancelled = list(service.watch_job(job.job_id))[-1]
    again = service.resume_job(job.job_id)
    assert (cancelled.state is JobState.CANCELLED) == (again.job_id != job.job_id)
    ended = list(service.watch_job(again.job_id))[-1]
    assert JobState.SUCCEEDED is ended.state
    asked = service.get_serving_search_report(again.job_id).request_json
    assert json.loads(asked)["num_finalists"] == _REQUEST.num_finalists
    assert ended == service.resume_job(again.job_id)
    with pytest.raises(UnknownJobError):
        service.resume_job("serving-search-none")


def test_a_job_whose_question_is_not_kept_cannot_be_resumed(tmp_path: Path) -> None:
    service = _open(tmp_path)
    endless = replace(_SCENARIO, workload=replace(_SCENARIO.workload, num_requests=10**6))
    job = service.create_serving_simulation(endless)
    service.cancel_job(job.job_id)
    assert JobState.CANCELLED is list(service.watch_job(job.job_id))[-1].state
    (tmp_path / f"{job.job_id}.request.json").unlink()
    with pytest.raises(InvalidRequestError, match="ask it again"):
        service.resume_job(job.job_id)
    service.close()


def test_an_address_without_a_cluster_fails_the_search_with_the_setting(tmp_path: Path) -> None:
    """And says so; the service lives on."""
    pytest.importorskip("ray", reason="the extra `search` is not installed")
    service = _open(tmp_path)
    service.close()
    away = _open(tmp_path, ray_address="127.0.0.1:1")
    job = away.create_serving_search(_REQUEST)
    last = list(away.watch_job(job.job_id))[-1]
    assert (JobState.FAILED, "SERVICE_UNAVAILABLE") == (last.state, last.error_reason)
    assert "ray_address" in last.error_message
    away.close()


@pytest.mark.parametrize("name", ["num_workers", "num_searches", "max_search_points"])
def test_settings_that_cannot_be_are_refused(name: str) -> None:
    settings = {"state_folder": "x", name: 0}
    with pytest.raises(InvalidRequestError, match=name):
        SimulatorConfig(**settings)  # type: ignore[arg-type]
