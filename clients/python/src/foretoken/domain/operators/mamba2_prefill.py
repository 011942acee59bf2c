"""Mamba2's scan over new tokens, in chunks; its projections are products of their own."""

from foretoken.domain.operators.spec.mamba2 import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "mamba2_prefill",
    "y_t = S_t C_t + D x_t, S by a selective scan, for the tokens of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
