"""The short causal convolution for one new token per sequence."""

from foretoken.domain.operators.spec.causal_conv import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "causal_conv_decode",
    "y = silu(sum of w_i x_{t-i}) for every channel of the next token of each sequence",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
