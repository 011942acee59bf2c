"""The gated delta rule: a state of keys times values that decays, forgets a key, learns a pair.

S <- a (S - b k (k^T S)) + b k v^T, y = S^T q for every value head; key heads serve several of them.
Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2025), equation 10.
"""

from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.recurrent import SCAN_CHUNK, RecurrentWork, SweptSizes
from foretoken.domain.units import Quantity

SIZES = (
    Dim("num_k_heads", "query and key heads on this device"),
    Dim("num_v_heads", "value heads on this device"),
    Dim("head_k_dim", "features of a query or key"),
    Dim("head_v_dim", "features of a value"),
)
# A product with the state for what the key recalls, one that writes and one that reads, at two
# each, and the decay.
STATE_FLOPS = 7


def _state(d: Dims) -> Quantity:
    return d["num_v_heads"] * d["head_k_dim"] * d["head_v_dim"]


def _token_elements(d: Dims) -> Quantity:
    keys = 2 * d["num_k_heads"] * d["head_k_dim"]
    # Values and outputs; the decay and the strength of each head.
    return keys + 2 * d["num_v_heads"] * (d["head_v_dim"] + 1)


def _saved_elements(d: Dims) -> Quantity:
    keys = 2 * d["num_k_heads"] * d["head_k_dim"]
    # Values, decay and strength; what solves a chunk for its tokens, a row a token and head.
    return keys + d["num_v_heads"] * (d["head_v_dim"] + 2 + SCAN_CHUNK)


WORK = RecurrentWork(
    token_flops=lambda d: STATE_FLOPS * _state(d),
    token_elements=_token_elements,
    state_elements=_state,
    saved_elements=_saved_elements,
)
# Qwen3.5-9B's, whole and of one rank of eight, and a small one to try.
SWEPT = SweptSizes(
    quick={"num_k_heads": 8, "num_v_heads": 16, "head_k_dim": 16, "head_v_dim": 16},
    full=(
        {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128},
        {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128},
    ),
)
