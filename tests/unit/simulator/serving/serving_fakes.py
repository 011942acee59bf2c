"""A predictor that knows the data sheet, and ready-made scenarios."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from foretoken.domain.errors import UnknownJobError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.job import Job
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import (
    PredictorTrainingReport,
    RequestColumns,
    SeriesColumns,
    ServingReport,
)
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.serving.simulation import simulate_serving
from foretoken.wire import ipc


class RooflinePredictor:
    """Answers whole columns with the roofline, between 0.8 and 1.5 of it; keeps the queries.

    GEMMs count as measured, attention as extrapolated, the rest as analytical. `frameworks` are the
    software that stands in for the engine's, by operator.
    """

    def __init__(
        self,
        versions: tuple[ModelVersion, ...] = (),
        frameworks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.queries: list[LatencyQuery] = []
        self.versions = versions
        self.frameworks = frameworks

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.queries.append(query)
        tables = tuple(self._answer(query.device, table) for table in query.tables)
        version = self.versions[0].version if self.versions else "roofline"
        return LatencyReply(model_version=version, tables=tables)

    def _answer(self, device: str, table: OperatorTable) -> LatencyColumns:
        spec = find_operator(table.operator)
        assert set(table.columns) == set(spec.dim_names)
        columns = {name: np.asarray(column) for name, column in table.columns.items()}
        for dim in spec.dims:
            assert columns[dim.name].min() >= dim.minimum, (table.operator, dim.name)
        if spec.is_collective:
            topology = topology_of_device(device)
            terms = collective_terms(spec, columns, int(columns["num_nodes"][0]), topology)
        else:
            terms = compute_terms(spec, columns, table.dtype, table.phase, find_device(device))
        latency_us = np.maximum(terms.compute_us, terms.memory_us) + terms.floor_us
        return LatencyColumns(
            latency_us=latency_us,
            low_us=0.8 * latency_us,
            high_us=1.5 * latency_us,
            provenance=np.full(len(latency_us), _provenance_of(table.operator).value),
            other_framework=self.frameworks.get(table.operator, ""),
        )

    def create_training(self, request: TrainRequest) -> Job:
        raise UnknownJobError.named(str(request), ())

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        raise UnknownJobError.named(job_id, ())

    def list_models(self) -> tuple[ModelVersion, ...]:
        return self.versions

    def get_job(self, job_id: str) -> Job:
        raise UnknownJobError.named(job_id, ())

    def list_jobs(self) -> tuple[Job, ...]:
        return ()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        raise UnknownJobError.named(job_id, ())

    def cancel_job(self, job_id: str) -> Job:
        raise UnknownJobError.named(job_id, ())


class SilentProgress(JobProgress):
    """Progress nobody watches."""

    def __init__(self) -> None:
        self.updates: list[float] = []

    def update(self, ratio: float, _message: str = "") -> None:
        self.updates.append(ratio)


def build_scenario(**changes: Any) -> ServingScenario:
    """Return Qwen2 7B on one A30 under light load and plain rules, other fields as given."""
    defaults = {"model": find_model("qwen2-7b"), "device": "a30", "engine": plain_engine()}
    return ServingScenario(**{**defaults, **changes})


def plain_engine(**changes: Any) -> EngineSpec:
    """Return an engine that caches and hides nothing, with some limits of its own."""
    return EngineSpec(profile="plain", **changes)


def simulate(
    scenario: ServingScenario, predictor: RooflinePredictor | None = None
) -> ServingReport:
    """Return the report of a scenario on data-sheet latencies, with its columns."""
    source = predictor or RooflinePredictor()
    result = simulate_serving(scenario, lambda spec: fetch_surfaces(spec, source), SilentProgress())
    if not result.report.feasibility.is_feasible:
        return result.report
    return replace(
        result.report,
        requests=ipc.table_to_record(result.tables["requests"], RequestColumns),
        series=ipc.table_to_record(result.tables["series"], SeriesColumns),
    )


def _provenance_of(operator: str) -> Provenance:
    if operator == "gemm":
        return Provenance.MEASURED
    if operator.startswith("attention"):
        return Provenance.EXTRAPOLATED
    return Provenance.ANALYTICAL
