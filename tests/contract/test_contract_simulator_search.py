"""Searches behave alike whether the simulator is embedded or remote."""

import dataclasses
from collections.abc import Iterator

import pytest
from contract_fakes import FakeCatalog
from contract_reach import Reach
from contract_scenarios import TINY_MODEL
from simulator_services import untrained_simulator

from foretoken.client.facade import Foretoken
from foretoken.client.services import SimulatorClient
from foretoken.domain.errors import (
    InvalidRequestError,
    SearchTooLargeError,
    UnknownJobError,
)
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.ports import SimulatorPort
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
from foretoken.simulator import servicer
from foretoken.simulator.service import SimulatorService
from foretoken.wire.arrow import read_table

_SCENARIO = ServingScenario(
    model=TINY_MODEL,
    device="a30",
    engine=EngineSpec(num_kv_blocks=1000),
    workload=WorkloadSpec(
        num_requests=40, rate_rps=5.0, prefill=LengthSpec(mean=64), decode=LengthSpec(mean=8)
    ),
)
_TARGETS = ServingTargets(limits=(LatencyLimit(metric="ttft_ms", percentile=99, limit_ms=500),))
_SEARCH = ServingSearchRequest(
    scenario=_SCENARIO,
    space=ServingSpace(max_devices=2, modes=("aggregated",), max_num_seqs=(4, 8)),
    targets=_TARGETS,
    num_finalists=2,
)
_CAPACITY = CapacityRequest(scenario=_SCENARIO, targets=_TARGETS, tolerance_ratio=0.2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatorService]:
    """One simulator for all tests; its predictor answers from the devices' physical limits."""
    folder = tmp_path_factory.mktemp("search")
    with untrained_simulator(folder, FakeCatalog(), max_search_points=10_000) as service:
        yield service


@pytest.fixture(scope="module")
def searched(service: SimulatorService) -> ServingSearchReport:
    """What one search answered, as the simulator itself gives it."""
    return Foretoken(simulator=service).search_serving(_SEARCH)


@pytest.fixture
def port(service: SimulatorService, reach: Reach) -> SimulatorPort:
    return reach(service, servicer.register, SimulatorClient.connect)


def test_a_search_gives_a_whole_report(searched: ServingSearchReport, port: SimulatorPort) -> None:
    """Nothing of the report is lost on the way: neither its candidates nor what was simulated."""
    assert searched.num_simulated == len(searched.finalists) > 0
    assert searched.num_distinct == len(searched.candidates.name)
    assert searched.best == searched.candidates.name[0]
    assert searched == port.get_serving_search_report(searched.job_id)
    table = read_table(port.read_serving_search_table(searched.job_id, "candidates"))
    assert list(searched.candidates.name) == table.column("name").to_pylist()


def test_what_was_simulated_can_be_taken_up_anywhere(
    searched: ServingSearchReport, port: SimulatorPort
) -> None:
    """Whoever comes back with the number of those it has misses none and sees none twice."""
    seen = [finalist.candidate for finalist in port.watch_serving_search(searched.job_id)]
    assert {finalist.candidate for finalist in searched.finalists} == set(seen)
    for first in range(len(seen) + 1):
        rest = [f.candidate for f in port.watch_serving_search(searched.job_id, first)]
        assert seen[first:] == rest


def test_a_search_can_be_asked_for_anywhere(
    searched: ServingSearchReport, port: SimulatorPort
) -> None:
    answered = dataclasses.replace(_SEARCH, num_finalists=0)
    report = Foretoken(simulator=port).search_serving(answered)
    assert searched.candidates == report.candidates
    assert () == report.finalists


def test_a_capacity_search_gives_a_whole_report(
    service: SimulatorService, port: SimulatorPort
) -> None:
    report = Foretoken(simulator=port).find_capacity(_CAPACITY)
    assert report.low_rps <= report.capacity_rps <= report.high_rps
    assert report.capacity_rps > 0
    assert service.get_capacity_report(report.job_id) == report


def test_too_large_a_space_is_refused_before_work_starts(port: SimulatorPort) -> None:
    before = {job.job_id for job in port.list_jobs()}
    space = dataclasses.replace(_SEARCH.space, max_num_seqs=tuple(range(1, 12_001)))
    with pytest.raises(SearchTooLargeError):
        port.create_serving_search(dataclasses.replace(_SEARCH, space=space))
    assert before == {job.job_id for job in port.list_jobs()}


def test_a_search_that_cannot_be_is_refused(port: SimulatorPort) -> None:
    closed = WorkloadSpec(arrival="closed_loop", arrival_options={"concurrency": "4"})
    scenario = dataclasses.replace(_SCENARIO, workload=closed)
    with pytest.raises(InvalidRequestError, match="rate"):
        Foretoken(simulator=port).find_capacity(dataclasses.replace(_CAPACITY, scenario=scenario))


def test_a_table_there_is_not_and_a_job_there_is_not_are_refused(
    searched: ServingSearchReport, port: SimulatorPort
) -> None:
    with pytest.raises(UnknownJobError):
        port.get_serving_search_report("nobody")
    with pytest.raises(UnknownJobError):
        list(port.watch_serving_search("nobody"))
    with pytest.raises(InvalidRequestError, match="requests"):
        read_table(port.read_serving_search_table(searched.job_id, "requests"))
