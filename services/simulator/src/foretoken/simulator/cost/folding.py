"""Operators whose time was measured as part of another's.

Profilers that time modules count the write to the KV cache into the attention, and the router into
the experts. Their rows look like any other's, so what else was measured tells them.
"""

from collections.abc import Mapping, Sequence

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.simulator.cost.answer import is_measured_here

# Role of an operator: the operators that can hold it.
_HOLDERS: Mapping[str, tuple[str, ...]] = {
    "kv_cache_write": ("attention_decode", "attention_decode_window", "mla_decode"),
    "moe_router": ("moe_experts", "moe_local_experts"),
}


def find_folded(answers: Sequence[tuple[OperatorNode, LatencyColumns]]) -> frozenset[str]:
    """Return the roles of operators that are counted in others and must not be added.

    One is where its holder was measured on the device, and it was not, in any size near the
    model's.
    """
    return frozenset(
        role
        for role, holders in _HOLDERS.items()
        if any(is_measured_here(a) for node, a in answers if node.operator in holders)
        and not any(is_measured_here(a) for node, a in answers if node.role == role)
    )
