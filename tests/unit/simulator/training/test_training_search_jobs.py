"""Training searches as jobs of the simulator: checked at once, watched, cancelled, resumed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from simulator_services import open_simulator
from training_fakes import DEVICE, TOPOLOGY, RooflinePredictor

from foretoken.domain.errors import (
    InvalidRequestError,
    JobNotFinishedError,
    SearchTooLargeError,
    UnknownDeviceError,
    UnknownJobError,
    UnknownPluginError,
    UnknownTopologyError,
)
from foretoken.domain.job import JobState
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    NodeGroup,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.domain.results.echo import Echo
from foretoken.simulator.echo import echo_training_search
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.training.search import search_training
from foretoken.simulator.service import SimulatorService

_SCENARIO = TrainingScenario(
    model=find_model("tiny-llama"),
    device=DEVICE,
    topology=TOPOLOGY,
    layout=ParallelLayout(dp=4),
    sequence_length=256,
    global_batch_size=8,
)
_SPACE = TrainingSpace(tp=(1, 2), cp=(1,), micro_batch_sizes=(1, 2), recompute=("none",))
_REQUEST = TrainingSearchRequest(scenario=_SCENARIO, space=_SPACE, num_finalists=3)


def _open(folder: Path, **settings: int | bool | str) -> SimulatorService:
    return open_simulator(folder, RooflinePredictor(), **settings)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatorService]:
    """One service for all tests, for its workers take a while to start."""
    service = _open(tmp_path_factory.mktemp("service"))
    yield service
    service.close()


def _search(service: SimulatorService, request: TrainingSearchRequest) -> TrainingSearchReport:
    job = service.create_training_search(request)
    last = list(service.watch_job(job.job_id))[-1]
    assert JobState.SUCCEEDED is last.state, last.error_message
    return service.get_training_search_report(job.job_id)


def _without_times(report: TrainingSearchReport) -> TrainingSearchReport:
    timeless = {"cpu_s": 0.0, "wall_s": 0.0, "closed_form_s": 0.0, "num_workers": 0}
    return replace(report, job_id="", echo=Echo(), **timeless)


def test_a_training_search_is_a_job_with_its_candidates(service: SimulatorService) -> None:
    """With what the search gives in this thread, and a table that can be read by itself."""
    report = _search(service, _REQUEST)
    alone = search_training(_REQUEST, RooflinePredictor(), InlineContext())
    alone = echo_training_search(_REQUEST, alone)
    assert _without_times(alone) == _without_times(report)
    assert 1 == report.num_workers
    table = service.read_training_search_table(report.job_id, "candidates").read_all()
    assert table["name"].to_pylist() == list(report.candidates.name)
    with pytest.raises(InvalidRequestError, match="candidates"):
        service.read_training_search_table(report.job_id, "spans")


def test_finalists_can_be_watched_from_any_place_and_afterwards(service: SimulatorService) -> None:
    job = service.create_training_search(_REQUEST)
    found = list(service.watch_training_search(job.job_id))
    report = service.get_training_search_report(job.job_id)
    assert report.num_simulated == len(found) == len(report.finalists) > 0
    assert {finalist.candidate for finalist in report.finalists} == {f.candidate for f in found}
    assert found[1:] == list(service.watch_training_search(job.job_id, 1))
    assert [] == list(service.watch_training_search(job.job_id, len(found)))
    with pytest.raises(InvalidRequestError, match="first"):
        list(service.watch_training_search(job.job_id, -1))
    with pytest.raises(UnknownJobError):
        list(service.watch_training_search("training-search-none"))
    with pytest.raises(InvalidRequestError, match="not a serving search"):
        list(service.watch_serving_search(job.job_id))


def test_progress_tells_how_many_points_run_and_fit() -> None:
    context = InlineContext()
    report = search_training(_REQUEST, RooflinePredictor(), context)
    ratios = [ratio for ratio, _ in context.progress]
    assert sorted(ratios) == ratios
    words = (
        f"{report.num_points:,} points: {report.num_legal:,} can run, {report.num_fitting:,} fit"
    )
    assert f"{words}; simulated 3 of 3" == context.progress[-1][1]


def test_a_search_that_is_too_large_never_becomes_a_job(tmp_path: Path) -> None:
    """Refused with the setting that would allow it."""
    service = _open(tmp_path, max_training_points=3, max_finalists=2)
    with pytest.raises(SearchTooLargeError, match=r"3 finalists .* simulator\.max_finalists"):
        service.create_training_search(_REQUEST)
    with pytest.raises(SearchTooLargeError, match=r"simulator\.max_training_points") as caught:
        service.create_training_search(replace(_REQUEST, num_finalists=0))
    assert "3" == caught.value.details["limit"]
    assert () == service.list_jobs()
    service.close()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (replace(_REQUEST, scenario=replace(_SCENARIO, device="a31")), UnknownDeviceError),
        (replace(_REQUEST, scenario=replace(_SCENARIO, topology="ring")), UnknownTopologyError),
        (replace(_REQUEST, space=TrainingSpace(devices=("a31",))), UnknownDeviceError),
        (replace(_REQUEST, space=TrainingSpace(pipeline_schedules=("zb",))), UnknownPluginError),
        (
            replace(_REQUEST, space=TrainingSpace(node_groups=(NodeGroup(device="a31"),))),
            UnknownDeviceError,
        ),
        (replace(_REQUEST, space=TrainingSpace(recompute=("some",))), InvalidRequestError),
        (
            replace(_REQUEST, scenario=replace(_SCENARIO, stage_layers=(4, 4))),
            InvalidRequestError,
        ),
    ],
    ids=["device", "topology", "other device", "schedule", "group", "recompute", "stage_layers"],
)
def test_a_space_of_what_there_is_not_is_refused_at_once(
    request_: TrainingSearchRequest, error: type[Exception], service: SimulatorService
) -> None:
    before = service.list_jobs()
    with pytest.raises(error):
        service.create_training_search(request_)
    assert before == service.list_jobs()


@pytest.mark.slow
def test_a_search_that_was_left_goes_on_with_the_next_service(tmp_path: Path) -> None:
    """Under its name, with the report of one that was never left."""
    first = _open(tmp_path)
    job = first.create_training_search(_REQUEST)
    first.close()
    second = _open(tmp_path, resumes_at_start=True)
    assert JobState.SUCCEEDED is list(second.watch_job(job.job_id))[-1].state
    found = second.get_training_search_report(job.job_id)
    assert _without_times(_search(second, _REQUEST)) == _without_times(found)
    second.close()


def test_a_search_can_be_cancelled(service: SimulatorService) -> None:
    """Between two pieces of its space; a report is not there before the end."""
    large = replace(_REQUEST, space=TrainingSpace(num_devices=tuple(range(8, 200, 8))))
    job = service.create_training_search(large)
    with pytest.raises(JobNotFinishedError):
        service.get_training_search_report(job.job_id)
    service.cancel_job(job.job_id)
    assert JobState.CANCELLED is list(service.watch_job(job.job_id))[-1].state
