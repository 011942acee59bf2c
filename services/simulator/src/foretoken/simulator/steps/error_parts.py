"""How errors of operators add up to that of a step: by families that err together.

Estimates of a family of operators come from one kind of table, kernel and software, so they err
together: within a family errors are summed. Families err on their own, so from family to family it
is their squares that add up. Kernels that stream through memory are families by what they do: how
many times the time of its data sheet each takes is its own, alike at all sizes. A family has two
parts that err on their own: what was measured on the device or the links themselves, and what is
estimated from others.

A step is timed with each part at its lower, then at its upper bounds. Its own bounds are the
estimate less the root of the sum of squares of what it shrinks by, and the same with what it grows
by. Squares are of µs, not of logarithms, since a step is a sum of times; each side is summed by
itself, as intervals reach farther up than down.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from foretoken.domain.measurements.estimate import OperatorTable, Provenance
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.steps.call_prices import HOST_GROUP, PricedTable

ERROR_FAMILIES = (
    # Those of experts too.
    "matrix products",
    "attention",
    # What a device does besides is bound by its memory. Source of its families:
    # `tests/benchmarks/bench_memory_bound_errors.py`: how many times the time of its data sheet a
    # kernel takes goes together from one kernel to another, on one device and software, at -0.17
    # (31 pairs); calls of one kernel are 0.03 apart, kernels 0.36 (in log units).
    "norms",
    "activations",
    "conversions to 8 bit",
    "rows of experts",
    "the optimizer",
    "other memory-bound operators",
    "collectives in a node",
    "collectives between nodes",
    # From one rank of a pipeline to the next, and round a ring.
    "point to point",
    # What it needs to launch kernels, as trainers' profiles have it.
    "the host",
)
# Families of estimates from a device's own measurements, then of those estimated from elsewhere.
NUM_PARTS = 2 * len(ERROR_FAMILIES)
_FROM_ELSEWHERE = (Provenance.TRANSFERRED.value, Provenance.ANALYTICAL.value)
_OF_GROUP = {
    **dict.fromkeys(("gemm", "moe", "lora"), "matrix products"),
    "attention": "attention",
    "optimizer": "the optimizer",
    HOST_GROUP: "the host",
}
_OF_OPERATOR = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "norm_upcast"), "norms"),
    **dict.fromkeys(("silu", "silu_mul", "gelu", "product", "bias_add"), "activations"),
    "quantize": "conversions to 8 bit",
    **dict.fromkeys(("moe_permute", "moe_unpermute", "moe_topk"), "rows of experts"),
    "send_recv": "point to point",
}


# The estimate, then each part at its lower bounds, then each at its upper ones.
NUM_CASES = 1 + 2 * NUM_PARTS


def price_cases(priced: PricedTable) -> tuple[Floats, ...]:
    """Return the estimates of a table, then what `price_parts` returns."""
    return (priced.latency_us, *price_parts(priced))


def price_parts(priced: PricedTable) -> tuple[Floats, ...]:
    """Return the prices of a table with each part at its lower bounds, then at its upper ones."""
    part = parts_of(priced.table, np.asarray(priced.answer.provenance))
    return tuple(
        np.where(part == number, np.asarray(bound_us, dtype=np.float64), priced.latency_us)
        for bound_us in (priced.answer.low_us, priced.answer.high_us)
        for number in range(NUM_PARTS)
    )


def parts_of(table: OperatorTable, provenance: Ints) -> Ints:
    """Return the part of every row of a table, from 0, whose estimates rest on this."""
    is_elsewhere = np.isin(provenance, _FROM_ELSEWHERE)
    parts: Ints = families_of(table) + len(ERROR_FAMILIES) * is_elsewhere
    return parts


def families_of(table: OperatorTable) -> Ints:
    """Return the place in `ERROR_FAMILIES` of every row of a table."""
    spec = find_operator(table.operator)
    named = _OF_OPERATOR.get(spec.name) or _OF_GROUP.get(spec.group)
    place = ERROR_FAMILIES.index(named or "other memory-bound operators")
    family = np.full(table.num_rows, place, dtype=np.int64)
    if spec.is_collective and named is None:
        is_far = np.asarray(table.columns.get("num_nodes", 1)) > 1
        family[:] = ERROR_FAMILIES.index("collectives in a node") + is_far
    return family


@dataclass(frozen=True, slots=True, eq=False)
class StepErrors:
    """What steps shrink and grow by with a part at its lower or upper bounds: (part, step)."""

    down_us: Floats
    up_us: Floats

    @classmethod
    def of_steps(cls, step_us: Floats, by_part_us: Floats) -> Self:
        """Take steps by their estimates and by the prices of `price_parts`: (price, step)."""
        low_us, high_us = np.split(by_part_us, 2)
        return cls(step_us - low_us, high_us - step_us)

    def bound(self, step_us: Floats) -> tuple[Floats, Floats]:
        """Return the low and the high µs of these steps."""
        down_us, up_us = (np.sqrt((own**2).sum(axis=0)) for own in (self.down_us, self.up_us))
        return step_us - down_us, step_us + up_us


def bound_cases(cases_us: Floats) -> tuple[float, float]:
    """Return the low and the high µs of what takes so long by the prices of `price_cases`."""
    low_us, high_us = StepErrors.of_steps(cases_us[0], cases_us[1:]).bound(cases_us[0])
    return float(low_us), float(high_us)
