"""A predictor of mixed clusters that knows nothing but data sheets, and a search over one."""

from collections.abc import Sequence
from functools import cache

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import Phase, find_operator
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
        names, columns = tuple(table.columns), table.columns.values()
        link = query.topology if find_operator(table.operator).is_collective else ""
        place = (table.operator, table.dtype, table.phase, link or query.device)
        latencies = [
            _sheet_us(*place, names, tuple(int(column[row]) for column in columns))
            for row in range(table.num_rows)
        ]
        return LatencyColumns(
            latency_us=latencies,
            low_us=[0.8 * latency for latency in latencies],
            high_us=[1.5 * latency for latency in latencies],
            provenance=[Provenance.ANALYTICAL.value] * len(latencies),
        )


@cache
def _sheet_us(
    operator: str,
    dtype: DType,
    phase: Phase,
    place: str,
    names: tuple[str, ...],
    row: tuple[int, ...],
) -> float:
    """Return what a call takes: searches of many tests ask the same."""
    spec, dims = find_operator(operator), dict(zip(names, row, strict=True))
    if spec.is_collective:
        terms = collective_terms(spec, dims, dims["num_nodes"], find_topology(place))
    else:
        terms = compute_terms(spec, dims, dtype, phase, find_device(place))
    return max(terms.compute_us, terms.memory_us) + terms.floor_us


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
