"""Kimi delta attention: the gated delta rule with a decay of its own for each feature of the key.

Source: Kimi Linear (Moonshot AI, 2025), section 3.
"""

from foretoken.domain.operators.spec.gated_delta import STATE_FLOPS
from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.recurrent import RecurrentWork
from foretoken.domain.units import Quantity

SIZES = (
    Dim("num_heads", "heads on this device, each with query, key and value"),
    Dim("head_dim", "features of a head"),
)


def _state(d: Dims) -> Quantity:
    return d["num_heads"] * d["head_dim"] * d["head_dim"]


WORK = RecurrentWork(
    token_flops=lambda d: STATE_FLOPS * _state(d),
    # Query, key, value, decay and output; the strength of each head.
    token_elements=lambda d: d["num_heads"] * (5 * d["head_dim"] + 1),
    state_elements=_state,
)
