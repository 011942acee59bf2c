"""Prometheus metrics of a simulator that runs in this process, read when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from foretoken.app.histogram_metric import add_histogram
from foretoken.domain.job import Job, JobState

if TYPE_CHECKING:
    from foretoken.simulator.statistics import SimulatorStatistics, WorkerCounts

_PREFIX = "foretoken_simulator"
# Kinds that are reported before there is a job of them.
_KINDS = ("serving", "training", "capacity", "serving-search")
_SEARCHES = ("capacity", "serving-search")


class ObservedSimulator(Protocol):
    """A simulator that counts what it does: one of this process, not a remote one."""

    @property
    def statistics(self) -> SimulatorStatistics:
        """What was simulated and searched."""

    @property
    def workers(self) -> WorkerCounts:
        """The workers of searches."""

    @property
    def max_queued_jobs(self) -> int:
        """Jobs that may wait."""

    def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs."""


class SimulatorMetrics(Collector):
    """The jobs that are there, what was simulated since the simulator was opened, and by whom."""

    def __init__(self, simulator: ObservedSimulator) -> None:
        self._simulator = simulator

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not open the simulator."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        jobs = self._simulator.list_jobs()
        yield from _collect_jobs(jobs)
        yield GaugeMetricFamily(
            f"{_PREFIX}_queue_limit", "Jobs that may wait", value=self._simulator.max_queued_jobs
        )
        yield from self._collect_work()
        workers = self._simulator.workers
        yield GaugeMetricFamily(
            f"{_PREFIX}_workers", "Workers of searches that are there", value=workers.num_alive
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_worker_restarts",
            "Workers that were started for one that died",
            value=workers.num_restarts,
        )

    def _collect_work(self) -> Iterator[Metric]:
        found = self._simulator.statistics.read()
        counts = (
            ("points_evaluated", "Points answered in closed form", found.num_evaluated),
            ("points_simulated", "Tasks of searches that workers simulated", found.num_simulated),
            ("journal_hits", "Results of searches not computed again", found.num_kept),
        )
        for name, meaning, value in counts:
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)
        seconds = HistogramMetricFamily(
            f"{_PREFIX}_simulation_seconds", "Time of a simulation", labels=("within",)
        )
        add_histogram(seconds, ("job",), found.simulation_s)
        add_histogram(seconds, ("search",), found.search_task_s)
        yield seconds


def _collect_jobs(jobs: tuple[Job, ...]) -> Iterator[Metric]:
    counts = Counter((job.kind, job.state) for job in jobs)
    gauge = GaugeMetricFamily(f"{_PREFIX}_jobs", "Jobs that are kept", labels=("kind", "state"))
    for kind in dict.fromkeys((*_KINDS, *(job.kind for job in jobs))):
        for state in JobState:
            gauge.add_metric((kind, state.name.lower()), counts[kind, state])
    yield gauge
    num_queued = sum(job.state is JobState.QUEUED for job in jobs)
    yield GaugeMetricFamily(f"{_PREFIX}_queue_length", "Jobs that wait", value=num_queued)
    num_running = sum(counts[kind, JobState.RUNNING] for kind in _SEARCHES)
    yield GaugeMetricFamily(f"{_PREFIX}_searches_running", "Searches under way", value=num_running)
