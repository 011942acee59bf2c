"""Families of operators whose estimates err alike, and how much alike.

A family has two parts that err on their own: what was measured on the device or the links
themselves, and what is estimated from others.
"""

import numpy as np

from foretoken.domain.measurements.estimate import OperatorTable, Provenance
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.steps.call_prices import PricedTable

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
# How errors of calls of other sizes go together, by family: of estimates from a device's own
# measurements, then of those estimated from elsewhere, which miss a device as a whole. Source:
# `tests/benchmarks/bench_error_correlation.py`, on operators measured on five devices; what was
# left out of training is estimated. No training step is in it. The last two of the second row are
# that of collectives in a node: too few networks were measured to leave any out.
_OWN = (0.21, 0.13, 0.58, 0.76, 0.27, 0.16)
_ELSEWHERE = (0.70, 0.72, 0.74, 0.76, 0.76, 0.76)
CORRELATIONS: Floats = np.array([*_OWN, *_ELSEWHERE])
# What a device computes, whose calls are of one size where strategies cut layers alike.
IS_COMPUTED: Flags = np.array([True, True, True, False, False, False] * 2)
_FROM_ELSEWHERE = (Provenance.TRANSFERRED.value, Provenance.ANALYTICAL.value)
_OF_GROUP = {"gemm": 0, "moe": 0, "lora": 0, "attention": 1}
_MEMORY_BOUND, _IN_NODE, _BETWEEN_NODES, _POINT_TO_POINT = 2, 3, 4, 5


def families_at_bound(priced: PricedTable) -> tuple[Floats, ...]:
    """Return the prices of a table in as many cases as `CORRELATIONS`: one part at its bounds.

    Bounds are the upper ones.
    """
    latency_us = priced.latency_us
    high_us = np.asarray(priced.answer.high_us, dtype=np.float64)
    part = parts_of(priced.table, np.asarray(priced.answer.provenance))
    return tuple(
        np.where(part == number, high_us, latency_us) for number in range(len(CORRELATIONS))
    )


def parts_of(table: OperatorTable, provenance: Ints) -> Ints:
    """Return the place in `CORRELATIONS` of every row of a table, whose estimates rest on this."""
    is_elsewhere = np.isin(provenance, _FROM_ELSEWHERE)
    parts: Ints = families_of(table) + len(ERROR_FAMILIES) * is_elsewhere
    return parts


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
