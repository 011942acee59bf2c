"""Mamba: a state per channel, each of whose features decays by itself and takes up the token.

S <- exp(dt A) S + dt x B, y = (S C + D x) silu(z); B and C are those of all channels.
Source: Mamba (Gu and Dao, 2023), algorithm 2 and section 3.3.2 (states stay inside the kernel, and
are computed again backward).
"""

from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.recurrent import RecurrentWork, SweptSizes
from foretoken.domain.units import Quantity

SIZES = (
    Dim("channels", "features on this device, each with a state"),
    Dim("state_dim", "features of B and C, the state of a channel"),
)
# The product that writes to the state and the one that reads it, at two each, the decay, its
# exponent and its exponential.
_STATE_FLOPS = 7


def _state(d: Dims) -> Quantity:
    return d["channels"] * d["state_dim"]


def _token_elements(d: Dims) -> Quantity:
    # Input, step, gate and output of each channel; B and C.
    return 4 * d["channels"] + 2 * d["state_dim"]


WORK = RecurrentWork(
    token_flops=lambda d: _STATE_FLOPS * _state(d),
    token_elements=_token_elements,
    state_elements=_state,
    # A and D.
    num_weights=lambda d: _state(d) + d["channels"],
    saved_elements=_token_elements,
)
# Jamba's, whole and of one rank of eight, and a small one to try.
SWEPT = SweptSizes(
    quick={"channels": 64, "state_dim": 16},
    full=({"channels": 8192, "state_dim": 16}, {"channels": 1024, "state_dim": 16}),
)
