"""A predictor that knows nothing but the device's data sheet."""

from collections.abc import Iterator

from foretoken.domain.errors import UnknownJobError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology
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
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.report import PredictorTrainingReport

DEVICE, TOPOLOGY = "a100_sxm_80", "a100_dgx"


class RooflinePredictor:
    """Answers with the roofline, between 0.8 and 1.5 of it; counts how often it was asked.

    `framework` is the software that stands in for the trainer's.
    """

    def __init__(self, framework: str = "") -> None:
        self.queries: list[LatencyQuery] = []
        self.framework = framework

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.queries.append(query)
        tables = tuple(self._answer(query, table) for table in query.tables)
        return LatencyReply(model_version="roofline", tables=tables)

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        spec, links = find_operator(table.operator), find_topology(query.topology or TOPOLOGY)
        latencies = []
        for row in range(table.num_rows):
            dims = {name: int(column[row]) for name, column in table.columns.items()}
            spec.check_call(dims)
            if spec.is_collective:
                assert dims["devices_per_node"] <= links.devices_per_node
                terms = collective_terms(spec, dims, dims["num_nodes"], links)
            else:
                terms = compute_terms(
                    spec, dims, table.dtype, table.phase, find_device(query.device)
                )
            latencies.append(max(terms.compute_us, terms.memory_us) + terms.floor_us)
        return LatencyColumns(
            latency_us=latencies,
            low_us=[0.8 * latency for latency in latencies],
            high_us=[1.5 * latency for latency in latencies],
            provenance=[Provenance.ANALYTICAL.value] * len(latencies),
            other_framework=self.framework,
        )

    def create_training(self, request: TrainRequest) -> Job:
        raise UnknownJobError.named(str(request), ())

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        raise UnknownJobError.named(job_id, ())

    def list_models(self) -> tuple[ModelVersion, ...]:
        return ()

    def get_job(self, job_id: str) -> Job:
        raise UnknownJobError.named(job_id, ())

    def list_jobs(self) -> tuple[Job, ...]:
        return ()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        raise UnknownJobError.named(job_id, ())

    def cancel_job(self, job_id: str) -> Job:
        raise UnknownJobError.named(job_id, ())


def build_scenario(layout: ParallelLayout | None = None, **changes: object) -> TrainingScenario:
    """Return a step of Llama 2 7B over `layout`, other fields as given."""
    fields: dict[str, object] = {
        "model": find_model("llama-2-7b"),
        "device": DEVICE,
        "topology": TOPOLOGY,
        "layout": layout or ParallelLayout(),
        **changes,
    }
    return TrainingScenario(**fields)  # type: ignore[arg-type]
