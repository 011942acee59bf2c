"""The simulator behaves alike whether it is embedded or remote."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_fakes import FakeCatalog
from contract_reach import Reach
from contract_scenarios import SERVING, TRAINING
from simulator_services import untrained_simulator

from foretoken.client.facade import Foretoken
from foretoken.client.services import SimulatorClient
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownJobError,
    UnknownPluginError,
    UnknownTopologyError,
)
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.job import Job, JobState
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.results.training_report import SPAN_KINDS, TrainingReport
from foretoken.simulator import servicer
from foretoken.simulator.service import SimulatorService
from foretoken.wire.arrow import read_table


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SimulatorService]:
    with untrained_simulator(tmp_path, FakeCatalog()) as service:
        yield service


@pytest.fixture
def port(service: SimulatorService, reach: Reach) -> SimulatorPort:
    return reach(service, servicer.register, SimulatorClient.connect)


def test_serving_gives_a_whole_report(service: SimulatorService, port: SimulatorPort) -> None:
    """Nothing of the report is lost on the way, not its single requests either."""
    seen: list[Job] = []
    report = Foretoken(simulator=port).simulate_serving(SERVING, on_progress=seen.append)
    assert seen[-1].state is JobState.SUCCEEDED
    assert report == service.get_serving_report(seen[-1].job_id)
    assert report.num_completed == 3
    assert list(report.requests.num_prefill_tokens) == [16, 16, 16]
    assert 0 < report.ttft_ms.p50 <= report.e2e_latency_ms.p50


def test_training_gives_a_whole_report(service: SimulatorService, port: SimulatorPort) -> None:
    seen: list[Job] = []
    report = Foretoken(simulator=port).simulate_training(TRAINING, on_progress=seen.append)
    assert report == service.get_training_report(seen[-1].job_id)
    assert report.step_time_ms > 0
    assert report.memory
    assert len(report.spans.stage) > 0
    assert len(report.memory_timeline.bytes) > 0


def test_the_tables_of_a_training_step_are_those_of_its_report(port: SimulatorPort) -> None:
    foretoken = Foretoken(simulator=port)
    report = foretoken.simulate_training(TRAINING)
    spans = read_table(foretoken.read_training_table(report, "spans"))
    assert {SPAN_KINDS[kind] for kind in report.spans.kind} == set(spans["kind"].to_pylist())
    memory = read_table(foretoken.read_training_table(report, "memory"))
    assert list(report.memory_timeline.bytes) == memory["bytes"].to_pylist()
    with pytest.raises(InvalidRequestError, match="spans, memory"):
        read_table(foretoken.read_training_table(report, "requests"))


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        (dataclasses.replace(TRAINING, pipeline_schedule="lottery"), UnknownPluginError),
        (
            dataclasses.replace(TRAINING, trainer=TrainerSpec(profile="lottery")),
            UnknownPluginError,
        ),
        (
            dataclasses.replace(TRAINING, trainer=TrainerSpec(rules={"reserved_ratio": "0"})),
            InvalidRequestError,
        ),
        (
            dataclasses.replace(TRAINING, moe_imbalance_ratio=math.inf),
            InvalidRequestError,
        ),
    ],
    ids=["schedule", "trainer", "rule", "infinite"],
)
def test_a_training_scenario_that_cannot_be_is_refused_at_once(
    scenario: TrainingScenario, error: type[Exception], port: SimulatorPort
) -> None:
    with pytest.raises(error):
        port.create_training_simulation(scenario)


def test_the_same_scenario_gives_the_same_numbers(port: SimulatorPort) -> None:
    """Reports and tables alike; only the jobs have names of their own."""
    foretoken = Foretoken(simulator=port)
    first, second = (foretoken.simulate_serving(SERVING) for _ in range(2))
    assert first == dataclasses.replace(second, job_id=first.job_id)
    for table in ("requests", "steps", "series"):
        tables = [read_table(foretoken.read_serving_table(r, table)) for r in (first, second)]
        assert tables[0].equals(tables[1])


def test_a_table_there_is_not_is_refused(port: SimulatorPort) -> None:
    foretoken = Foretoken(simulator=port)
    report = foretoken.simulate_serving(SERVING)
    with pytest.raises(InvalidRequestError, match="requests, steps, series"):
        read_table(foretoken.read_serving_table(report, "tokens"))


def test_an_infeasible_deployment_is_a_result_with_a_reason(port: SimulatorPort) -> None:
    """24 GB hold no model of a hundred billion parameters."""
    large = dataclasses.replace(
        SERVING.model, num_layers=100, hidden=12_288, num_heads=96, num_kv_heads=96, head_dim=128,
        intermediate=49_152,
    )  # fmt: skip
    scenario = dataclasses.replace(SERVING, model=large)
    report = Foretoken(simulator=port).simulate_serving(scenario)
    assert not report.feasibility.is_feasible
    assert report.feasibility.reason


def test_a_deployment_that_refuses_everybody_says_which_requests(port: SimulatorPort) -> None:
    """It is infeasible, and was simulated all the same."""
    workload = WorkloadSpec(num_requests=2, prefill=LengthSpec(kind="fixed", mean=1_000_000))
    report = Foretoken(simulator=port).simulate_serving(
        dataclasses.replace(SERVING, workload=workload)
    )
    assert not report.feasibility.is_feasible
    assert set(report.requests.outcome) == {"context_too_long"}


def test_a_layout_that_does_not_divide_is_infeasible(port: SimulatorPort) -> None:
    scenario = dataclasses.replace(SERVING, layout=ParallelLayout(tp=3))
    report = Foretoken(simulator=port).simulate_serving(scenario)
    assert not report.feasibility.is_feasible
    assert "3" in report.feasibility.reason


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        (dataclasses.replace(SERVING, device="a31"), UnknownDeviceError),
        (dataclasses.replace(SERVING, topology="ring"), UnknownTopologyError),
        (
            dataclasses.replace(SERVING, engine=EngineSpec(profile="lottery")),
            UnknownPluginError,
        ),
        (
            dataclasses.replace(SERVING, engine=EngineSpec(rules={"scheduler": "lottery"})),
            UnknownPluginError,
        ),
        (
            dataclasses.replace(SERVING, engine=EngineSpec(rules={"block_size": "0"})),
            InvalidRequestError,
        ),
        (
            dataclasses.replace(
                SERVING, workload=dataclasses.replace(SERVING.workload, window_end_s=math.inf)
            ),
            InvalidRequestError,
        ),
    ],
    ids=["device", "topology", "engine", "scheduler", "block size", "infinite"],
)
def test_a_scenario_that_cannot_be_is_refused_at_once(
    scenario: ServingScenario, error: type[Exception], port: SimulatorPort
) -> None:
    with pytest.raises(error):
        port.create_serving_simulation(scenario)


def test_an_unknown_job_is_not_found(port: SimulatorPort) -> None:
    with pytest.raises(UnknownJobError):
        port.get_serving_report("nobody")


def test_reports_of_the_other_kind_are_not_given(port: SimulatorPort) -> None:
    """A training report is not a serving report."""
    job = port.create_training_simulation(TRAINING)
    list(port.watch_job(job.job_id))
    assert isinstance(port.get_training_report(job.job_id), TrainingReport)
    with pytest.raises(InvalidRequestError):
        port.get_serving_report(job.job_id)
