"""Families of operators whose estimates err alike, and a predictor that errs in one of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.estimate import LatencyColumns, LatencyQuery, LatencyReply, OperatorTable
from foretoken.domain.operator import find_operator
from foretoken.domain.ports import ModelVersion
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource

# Matrix products, with those of experts; attention; whatever else a device computes, which memory
# bounds; what devices of one node exchange; what several nodes exchange; and copies from one rank
# of a pipeline to another.
ERROR_FAMILIES = (
    "matrix products",
    "attention",
    "memory-bound operators",
    "collectives in a node",
    "collectives between nodes",
    "point to point",
)
_FAMILY_OF_GROUP = {"gemm": 0, "moe": 0, "lora": 0, "attention": 1}
_MEMORY_BOUND, _IN_NODE, _BETWEEN_NODES, _POINT_TO_POINT = 2, 3, 4, 5
_Key = tuple[object, ...]


class FamilyErrors:
    """Asks a predictor each question once, and answers it with any family at its upper bound."""

    def __init__(self, predictor: LatencySource) -> None:
        """Keep who is asked."""
        self._predictor = predictor
        self._replies: dict[_Key, LatencyReply] = {}
        self._uncertain: set[int] = set()

    def source(self, family: int) -> LatencySource:
        """Return a predictor that answers the upper bound for one of `ERROR_FAMILIES`."""
        return _FamilyAtBound(self, family)

    def is_certain(self, family: int) -> bool:
        """Tell whether no operator of a family that was asked about has an error."""
        return family not in self._uncertain

    def ask(self, query: LatencyQuery) -> LatencyReply:
        """Return the predictor's answer, of a question asked before without asking again."""
        key = _key(query)
        if key not in self._replies:
            reply = self._predictor.predict(query)
            self._replies[key] = reply
            for table, answer in zip(query.tables, reply.tables, strict=True):
                is_uncertain = np.asarray(answer.high_us) > np.asarray(answer.latency_us)
                self._uncertain |= set(families_of(table)[is_uncertain].tolist())
        return self._replies[key]


class _FamilyAtBound:
    """A predictor whose estimate of one family is its upper bound."""

    def __init__(self, errors: FamilyErrors, family: int) -> None:
        self._errors, self._family = errors, family

    def list_models(self) -> Sequence[ModelVersion]:
        """Return none: what is not real is not kept."""
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates, of the family the upper bounds."""
        reply = self._errors.ask(query)
        tables = tuple(
            _at_bound(answer, families_of(table) == self._family)
            for table, answer in zip(query.tables, reply.tables, strict=True)
        )
        return replace(reply, tables=tables)


def families_of(table: OperatorTable) -> np.ndarray:
    """Return the place in `ERROR_FAMILIES` of every row of a table."""
    spec = find_operator(table.operator)
    if not spec.is_collective:
        return np.full(table.num_rows, _FAMILY_OF_GROUP.get(spec.group, _MEMORY_BOUND))
    if spec.name == "send_recv":
        return np.full(table.num_rows, _POINT_TO_POINT)
    num_nodes = np.broadcast_to(np.asarray(table.columns.get("num_nodes", 1)), table.num_rows)
    return np.where(num_nodes > 1, _BETWEEN_NODES, _IN_NODE)


def _at_bound(answer: LatencyColumns, rows: Flags) -> LatencyColumns:
    estimate: Floats = np.asarray(answer.latency_us, dtype=np.float64)
    high = np.where(rows, np.asarray(answer.high_us, dtype=np.float64), estimate)
    return replace(answer, latency_us=high)


def _key(query: LatencyQuery) -> _Key:
    """Return what tells questions apart."""
    tables = tuple(
        (
            *(table.operator, table.dtype, table.phase, table.variant, table.kernel),
            *((name, np.asarray(column).tobytes()) for name, column in table.columns.items()),
        )
        for table in query.tables
    )
    return (query.device, query.topology, query.framework, tables)
