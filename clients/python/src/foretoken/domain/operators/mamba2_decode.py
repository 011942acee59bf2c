"""Mamba2's update of the state for one new token per sequence."""

from foretoken.domain.operators.spec.mamba2 import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "mamba2_decode",
    "y = S C + D x, S updated by the next token of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
