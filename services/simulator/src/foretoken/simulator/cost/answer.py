"""Questions collected from everywhere, asked together, and their answers in channels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import (
    COVERED_PROVENANCES,
    LatencyColumns,
    OperatorTable,
    Provenance,
)
from foretoken.simulator.grid import Flags, Floats

Key = tuple[Any, ...]

# The lower and the upper bound follow the operator groups.
NUM_BOUNDS = 2


class Questions:
    """Tables of operator calls, each once."""

    def __init__(self) -> None:
        self._tables: dict[Key, OperatorTable] = {}

    @property
    def tables(self) -> tuple[OperatorTable, ...]:
        """All tables, in the order in which they were first added."""
        return tuple(self._tables.values())

    def add(self, table: OperatorTable) -> None:
        """Ask about a table, unless it was asked about."""
        self._tables.setdefault(key_of(table), table)

    def add_all(self, others: "Questions") -> None:
        """Ask all that others ask."""
        for table in others.tables:
            self.add(table)

    def match(self, answers: Sequence[LatencyColumns]) -> "Answers":
        """Return the answers to all tables, which are in their order."""
        return Answers(dict(zip(self._tables, answers, strict=True)))


class Answers:
    """What the predictor answered, by table."""

    def __init__(self, by_key: Mapping[Key, LatencyColumns]) -> None:
        self.by_key = by_key

    def replaced_by(self, others: "Answers") -> "Answers":
        """Return the answers with others to the same tables in their place."""
        return Answers({**self.by_key, **others.by_key})

    def of(self, table: OperatorTable) -> LatencyColumns:
        """Return the answer to a table that was asked about."""
        return self.by_key[key_of(table)]


def table_of_node(node: OperatorNode) -> OperatorTable:
    """Return the calls of an operator, one row per grid point."""
    arrays = np.broadcast_arrays(*(np.atleast_1d(value) for value in node.dims.values()))
    columns = {
        name: np.rint(array).astype(np.int64) for name, array in zip(node.dims, arrays, strict=True)
    }
    return OperatorTable(
        operator=node.operator,
        dtype=node.dtype,
        phase=node.phase,
        columns=columns,
        variant=node.variant,
    )


def key_of(table: OperatorTable) -> Key:
    """Return what tells a table from others."""
    columns = tuple((name, column.tobytes()) for name, column in sorted(table.columns.items()))
    return (table.operator, table.dtype, table.phase, table.variant, table.kernel, columns)


def num_channels(num_groups: int) -> int:
    """Return the channels of a surface: groups, bounds, then the time by provenance."""
    return num_groups + NUM_BOUNDS + len(Provenance)


def channels_of(answer: LatencyColumns, group: int, num_groups: int) -> Floats:
    """Return the channels of one call of an operator of that group, [channel, grid point]."""
    latency_us = np.asarray(answer.latency_us, dtype=np.float64)
    provenance = np.asarray(answer.provenance)
    values = np.zeros((num_channels(num_groups), len(latency_us)))
    values[group] = latency_us
    values[num_groups] = answer.low_us
    values[num_groups + 1] = answer.high_us
    for index, member in enumerate(Provenance):
        values[num_groups + NUM_BOUNDS + index] = latency_us * (provenance == member.value)
    return values


def is_measured_here(answer: LatencyColumns) -> bool:
    """Whether measurements of the device itself surround any of the calls."""
    return bool(covered_rows(answer).any())


def covered_rows(answer: LatencyColumns) -> Flags:
    """Return for each call whether measurements of the device itself surround it."""
    return np.isin(np.asarray(answer.provenance), COVERED_PROVENANCES)
