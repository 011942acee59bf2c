"""Families of operators whose estimates err alike."""

import numpy as np

from foretoken.domain.estimate import LatencyColumns, OperatorTable
from foretoken.domain.operator import find_operator
from foretoken.simulator.grid import Floats, Ints

ERROR_FAMILIES = (
    # Those of experts too.
    "matrix products",
    "attention",
    # Whatever else a device computes.
    "memory-bound operators",
    "collectives in a node",
    "collectives between nodes",
    # From one rank of a pipeline to the next, and round a ring.
    "point to point",
)
_OF_GROUP = {"gemm": 0, "moe": 0, "lora": 0, "attention": 1}
_MEMORY_BOUND, _IN_NODE, _BETWEEN_NODES, _POINT_TO_POINT = 2, 3, 4, 5


def families_at_bound(
    table: OperatorTable, answer: LatencyColumns, sustained_us: Floats
) -> tuple[Floats, ...]:
    """Return the prices of a table in as many cases: one of `ERROR_FAMILIES` at its upper bounds.

    `sustained_us` are the estimates at the rate that a device keeps up, which bounds lack.
    """
    high_us = np.maximum(np.asarray(answer.high_us, dtype=np.float64), sustained_us)
    family = families_of(table)
    return tuple(
        np.where(family == number, high_us, sustained_us) for number in range(len(ERROR_FAMILIES))
    )


def families_of(table: OperatorTable) -> Ints:
    """Return the place in `ERROR_FAMILIES` of every row of a table."""
    spec = find_operator(table.operator)
    family = np.full(table.num_rows, _OF_GROUP.get(spec.group, _MEMORY_BOUND), dtype=np.int64)
    if spec.is_collective:
        is_far = np.asarray(table.columns.get("num_nodes", 1)) > 1
        family[:] = np.where(is_far, _BETWEEN_NODES, _IN_NODE)
    if spec.name == "send_recv":
        family[:] = _POINT_TO_POINT
    return family
