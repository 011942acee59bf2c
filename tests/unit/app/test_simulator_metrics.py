"""What operators can watch of a simulator."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.service_metrics import SimulatorMetrics
from foretoken.domain.job import Job, JobState
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.service import SimulatorService
from foretoken.simulator.statistics import SimulatorStatistics, WorkerCounts


@dataclass
class _Simulator:
    """A simulator as its metrics see it."""

    jobs: tuple[Job, ...] = ()
    statistics: SimulatorStatistics = field(default_factory=SimulatorStatistics)
    workers: WorkerCounts = field(default_factory=WorkerCounts)
    max_queued_jobs: int = 64

    def list_jobs(self) -> tuple[Job, ...]:
        return self.jobs


def _registry(simulator: _Simulator) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SimulatorMetrics(simulator))
    return registry


def _job(kind: str, state: JobState) -> Job:
    return Job(job_id="job", kind=kind, state=state)


def _sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"foretoken_simulator_{name}", labels)


def test_jobs_are_counted_by_kind_and_state() -> None:
    """Searches under way are those of both kinds; whoever waits is in the queue."""
    jobs = (
        _job("serving", JobState.QUEUED),
        _job("serving-search", JobState.QUEUED),
        _job("serving-search", JobState.RUNNING),
        _job("capacity", JobState.RUNNING),
        _job("serving", JobState.RUNNING),
        _job("capacity", JobState.FAILED),
    )
    registry = _registry(_Simulator(jobs=jobs))
    assert _sample(registry, "jobs", kind="capacity", state="failed") == 1.0
    assert _sample(registry, "jobs", kind="serving", state="queued") == 1.0
    assert _sample(registry, "jobs", kind="training", state="running") == 0.0
    assert _sample(registry, "searches_running") == 2.0
    assert (_sample(registry, "queue_length"), _sample(registry, "queue_limit")) == (2.0, 64.0)


def test_work_is_counted() -> None:
    """Points, tasks, what was kept, and the time of each."""
    simulator = _Simulator(workers=WorkerCounts(num_alive=2, num_restarts=1))
    simulator.statistics.observe_evaluated(1_000)
    simulator.statistics.observe_kept(3)
    for elapsed_s in (0.2, 0.3, 4000.0):
        simulator.statistics.observe_search_task(elapsed_s)
    simulator.statistics.observe_simulation(1.5)
    registry = _registry(simulator)
    names = ("points_evaluated_total", "points_simulated_total", "journal_hits_total")
    assert [_sample(registry, name) for name in names] == [1000.0, 3.0, 3.0]
    assert (_sample(registry, "workers"), _sample(registry, "worker_restarts_total")) == (2.0, 1.0)
    buckets = [
        _sample(registry, "simulation_seconds_bucket", within="search", le=bound)
        for bound in ("0.1", "0.25", "0.5", "1800.0", "+Inf")
    ]
    assert buckets == [0.0, 1.0, 2.0, 2.0, 3.0]
    assert _sample(registry, "simulation_seconds_sum", within="job") == pytest.approx(1.5)


def test_a_service_counts_what_it_does(tmp_path: Path) -> None:
    """The metrics of a running server's own simulator, one simulation after it has started."""
    composition = Composition(AppConfig(home=str(tmp_path)))
    try:
        simulator = composition.simulator
        assert isinstance(simulator, SimulatorService)
        workload = WorkloadSpec(num_requests=3, decode=LengthSpec(mean=2))
        scenario = ServingScenario(model=load_model("qwen2-7b"), device="a30", workload=workload)
        job = simulator.create_serving_simulation(scenario)
        assert list(simulator.watch_job(job.job_id))[-1].state is JobState.SUCCEEDED
        registry = CollectorRegistry()
        registry.register(SimulatorMetrics(simulator))
        assert _sample(registry, "jobs", kind="serving", state="succeeded") == 1.0
        assert _sample(registry, "simulation_seconds_count", within="job") == 1.0
        assert _sample(registry, "workers") == 0.0
        assert b"foretoken_simulator_points_evaluated_total 0.0" in generate_latest(registry)
    finally:
        composition.close()
