"""A predictor of mixed clusters that knows nothing but data sheets, and a search over one."""

from collections.abc import Sequence

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import ModelVersion
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    NodeGroup,
    TrainingSearchRequest,
    TrainingSpace,
)

GROUPS = (
    NodeGroup(device="a100_sxm_80", topology="a100_dgx", num_nodes=1, usd_per_hour=4.0),
    NodeGroup(device="a40", topology="a40_pcie", num_nodes=2, usd_per_hour=1.0),
)


class SheetPredictor:
    """Answers with the roofline of the device and the links that are asked about."""

    def list_models(self) -> Sequence[ModelVersion]:
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        tables = tuple(self._answer(query, table) for table in query.tables)
        return LatencyReply(model_version="sheet", tables=tables)

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        spec = find_operator(table.operator)
        latencies = []
        for row in range(table.num_rows):
            dims = {name: int(column[row]) for name, column in table.columns.items()}
            if spec.is_collective:
                links = find_topology(query.topology)
                terms = collective_terms(spec, dims, dims["num_nodes"], links)
            else:
                device = find_device(query.device)
                terms = compute_terms(spec, dims, table.dtype, table.phase, device)
            latencies.append(max(terms.compute_us, terms.memory_us) + terms.floor_us)
        return LatencyColumns(
            latency_us=latencies,
            low_us=[0.8 * latency for latency in latencies],
            high_us=[1.5 * latency for latency in latencies],
            provenance=[Provenance.ANALYTICAL.value] * len(latencies),
        )


def build_request(**changes: object) -> TrainingSearchRequest:
    """Return a search of Llama 2 7B over a node of A100 and two of A40, its space as given."""
    scenario = {"global_batch_size": 32, "recompute": "full", **_take(changes, _SCENARIO)}
    asked = {"num_finalists": 0, **_take(changes, ("objective", "num_finalists"))}
    space = {
        "node_groups": GROUPS,
        "partition": "dynamic",
        "tp": (2, 4),
        "micro_batch_sizes": (1, 2),
        **changes,
    }
    return TrainingSearchRequest(
        scenario=TrainingScenario(
            model=find_model("llama-2-7b"),
            device="a100_sxm_80",
            **scenario,  # type: ignore[arg-type]
        ),
        space=TrainingSpace(**space),  # type: ignore[arg-type]
        **asked,  # type: ignore[arg-type]
    )


_SCENARIO = ("global_batch_size", "recompute", "zero_stage", "pipeline_schedule", "trainer")


def _take(changes: dict[str, object], names: Sequence[str]) -> dict[str, object]:
    return {name: changes.pop(name) for name in names if name in changes}
