"""Mamba's update of the state for one new token per sequence."""

from foretoken.domain.operators.spec.channel_scan import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "mamba_decode",
    "y = (S C + D x) silu(z), S updated by the next token of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
