"""Kimi delta attention: the gated delta rule with a decay of its own for each feature of the key.

Source: Kimi Linear (Moonshot AI, 2025), section 3.
"""

from foretoken.domain.operators.spec.gated_delta import STATE_FLOPS
from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.recurrent import SCAN_CHUNK, RecurrentWork, SweptSizes
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
    # Query, key, value and decay, the strength; two rows of a chunk's products a token and head.
    saved_elements=lambda d: d["num_heads"] * (4 * d["head_dim"] + 1 + 2 * SCAN_CHUNK),
)
# Kimi-K3's, whole and of one rank of eight, and a small one to try.
SWEPT = SweptSizes(
    quick={"num_heads": 16, "head_dim": 16},
    full=({"num_heads": 96, "head_dim": 128}, {"num_heads": 12, "head_dim": 128}),
)
