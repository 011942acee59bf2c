"""Ask the predictor once for all operators of a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foretoken.domain.estimate import (
    DType,
    LatencyQuery,
    OperatorCall,
    Phase,
    Provenance,
    table_of_calls,
)
from foretoken.domain.graph import OperatorNode
from foretoken.domain.ports import PredictorPort
from foretoken.domain.scenario import TrainingScenario

_Key = tuple[str, DType, Phase, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Price:
    """What one call of an operator costs, in µs, and what the figure rests on."""

    latency_us: float
    low_us: float
    high_us: float
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class OperatorPrices:
    """Prices of all operators of a step, and the model version that gave them."""

    model_version: str
    by_call: Mapping[_Key, Price]

    def find(self, node: OperatorNode) -> Price:
        """Return the price of one repetition of a node."""
        return self.by_call[_key(node)]


def fetch_prices(
    nodes: Iterable[OperatorNode], scenario: TrainingScenario, predictor: PredictorPort
) -> OperatorPrices:
    """Return the prices of all nodes, in one call with every distinct operator call once."""
    tables: dict[tuple[str, DType, Phase], dict[_Key, OperatorCall]] = {}
    for node in nodes:
        key = _key(node)
        tables.setdefault(key[:3], {})[key] = _call(node)
    query = LatencyQuery(
        device=scenario.device,
        topology=scenario.topology,
        framework=scenario.framework,
        tables=tuple(table_of_calls(list(calls.values())) for calls in tables.values()),
    )
    reply = predictor.predict(query)
    by_call: dict[_Key, Price] = {}
    for calls, columns in zip(tables.values(), reply.tables, strict=True):
        for row, key in enumerate(calls):
            by_call[key] = Price(
                latency_us=float(columns.latency_us[row]),
                low_us=float(columns.low_us[row]),
                high_us=float(columns.high_us[row]),
                provenance=Provenance(int(columns.provenance[row])),
            )
    return OperatorPrices(reply.model_version, by_call)


def _call(node: OperatorNode) -> OperatorCall:
    return OperatorCall(
        operator=node.operator,
        dtype=node.dtype,
        phase=node.phase,
        dims={name: int(value) for name, value in node.dims.items()},
    )


def _key(node: OperatorNode) -> _Key:
    dims = tuple(int(value) for _, value in sorted(node.dims.items()))
    return node.operator, node.dtype, node.phase, dims
