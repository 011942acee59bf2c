"""Mamba's scan over new tokens, channel by channel; its projections are products of their own."""

from foretoken.domain.operators.spec.channel_scan import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "mamba_prefill",
    "y_t = (S_t C_t + D x_t) silu(z_t), S by a selective scan, for the tokens of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
