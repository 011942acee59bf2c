"""Plans and searches of training behave alike whether the simulator is embedded or remote."""

import dataclasses
from collections.abc import Iterator

import pytest
from contract_fakes import FakeCatalog
from contract_reach import Reach
from contract_scenarios import TINY_MODEL
from simulator_services import untrained_simulator

from foretoken.client.facade import Foretoken
from foretoken.client.services import SimulatorClient
from foretoken.domain.errors import InvalidRequestError, SearchTooLargeError, UnknownJobError
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import FailureRules, PriceRules, TrainingRunRequest
from foretoken.domain.requests.training_search import (
    TRAINING_OBJECTIVES,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator import servicer
from foretoken.simulator.service import SimulatorService
from foretoken.wire.arrow import read_table

_SCENARIO = TrainingScenario(
    model=TINY_MODEL, device="a100_sxm_80", sequence_length=128, global_batch_size=8
)
_SEARCH = TrainingSearchRequest(
    scenario=_SCENARIO,
    space=TrainingSpace(
        num_devices=(4,),
        tp=(1, 2),
        pp=(1, 2),
        recompute=("none",),
        usd_per_hour={"a100_sxm_80": 2.0},
    ),
    num_finalists=2,
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatorService]:
    """One simulator for all tests; its predictor answers from the devices' physical limits."""
    folder = tmp_path_factory.mktemp("search")
    with untrained_simulator(folder, FakeCatalog(), max_training_points=100_000) as service:
        yield service


@pytest.fixture(scope="module")
def searched(service: SimulatorService) -> TrainingSearchReport:
    """What one search answered, as the simulator itself gives it."""
    return Foretoken(simulator=service).search_training(_SEARCH)


@pytest.fixture
def port(service: SimulatorService, reach: Reach) -> SimulatorPort:
    return reach(service, servicer.register, SimulatorClient.connect)


def test_a_search_gives_a_whole_report(searched: TrainingSearchReport, port: SimulatorPort) -> None:
    """Nothing of the report is lost on the way, and every strategy is counted once."""
    assert searched.num_simulated == len(searched.finalists) > 0
    ruled_out = sum(item.num_strategies for item in searched.ruled_out)
    assert searched.num_points == searched.num_fitting + ruled_out
    assert set(TRAINING_OBJECTIVES) == set(searched.best)
    assert searched == port.get_training_search_report(searched.job_id)
    table = read_table(port.read_training_search_table(searched.job_id, "candidates"))
    assert list(searched.candidates.name) == table.column("name").to_pylist()


def test_what_was_simulated_can_be_taken_up_anywhere(
    searched: TrainingSearchReport, port: SimulatorPort
) -> None:
    """Whoever comes back with the number of those it has misses none and sees none twice."""
    seen = [finalist.candidate for finalist in port.watch_training_search(searched.job_id)]
    assert {finalist.candidate for finalist in searched.finalists} == set(seen)
    for first in range(len(seen) + 1):
        rest = [f.candidate for f in port.watch_training_search(searched.job_id, first)]
        assert seen[first:] == rest


def test_too_large_a_space_is_refused_before_work_starts(port: SimulatorPort) -> None:
    before = {job.job_id for job in port.list_jobs()}
    space = dataclasses.replace(_SEARCH.space, global_batch_sizes=tuple(range(1, 12_001)))
    with pytest.raises(SearchTooLargeError):
        port.create_training_search(dataclasses.replace(_SEARCH, space=space))
    assert before == {job.job_id for job in port.list_jobs()}


def test_a_table_there_is_not_and_a_job_there_is_not_are_refused(
    searched: TrainingSearchReport, port: SimulatorPort
) -> None:
    with pytest.raises(UnknownJobError):
        port.get_training_search_report("nobody")
    with pytest.raises(UnknownJobError):
        list(port.watch_training_search("nobody"))
    with pytest.raises(InvalidRequestError, match="spans"):
        read_table(port.read_training_search_table(searched.job_id, "spans"))


def test_memory_is_planned_anywhere(service: SimulatorService, port: SimulatorPort) -> None:
    report = port.plan_training_memory(_SCENARIO)
    assert service.plan_training_memory(_SCENARIO) == report
    assert [stage.stage for stage in report.memory] == [0]


def test_a_run_is_planned_anywhere(service: SimulatorService, port: SimulatorPort) -> None:
    request = TrainingRunRequest(
        scenario=_SCENARIO,
        num_tokens=1e9,
        failures=FailureRules(device_mtbf_hours=1000.0),
        prices=PriceRules(usd_per_hour=2.0),
    )
    report = port.plan_training_run(request)
    assert service.plan_training_run(request) == report
    assert report.days > report.ideal_days > 0
