"""Mamba2: a state per head that decays by one number and takes up the token.

S <- exp(dt A) S + dt x B^T, y = S C + D x; heads of a group share B and C.
Source: Transformers are SSMs (Dao and Gu, 2024), section 7.
"""

from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.recurrent import RecurrentWork, SweptSizes
from foretoken.domain.units import Quantity

SIZES = (
    Dim("num_heads", "heads on this device"),
    Dim("head_dim", "features of a head"),
    Dim("num_groups", "groups of heads on this device, each with its B and C"),
    Dim("state_dim", "features of B and C, the columns of a head's state"),
)
# The product that writes to the state and the one that reads it, at two each, and the decay.
_STATE_FLOPS = 5


def _state(d: Dims) -> Quantity:
    return d["num_heads"] * d["head_dim"] * d["state_dim"]


def _token_elements(d: Dims) -> Quantity:
    # Input and output, and the step of each head.
    return d["num_heads"] * (2 * d["head_dim"] + 1) + 2 * d["num_groups"] * d["state_dim"]


WORK = RecurrentWork(
    token_flops=lambda d: _STATE_FLOPS * _state(d),
    token_elements=_token_elements,
    state_elements=_state,
    # Input, step and output of each head, B and C; states are computed again.
    saved_elements=_token_elements,
)
# Nemotron 3 Nano's, whole and of one rank of eight, and a small one to try.
SWEPT = SweptSizes(
    quick={"num_heads": 16, "head_dim": 8, "num_groups": 2, "state_dim": 16},
    full=(
        {"num_heads": 64, "head_dim": 64, "num_groups": 8, "state_dim": 128},
        {"num_heads": 8, "head_dim": 64, "num_groups": 1, "state_dim": 128},
    ),
)
