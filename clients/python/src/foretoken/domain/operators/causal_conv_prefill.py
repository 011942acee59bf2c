"""The short causal convolution over the new tokens of each sequence."""

from foretoken.domain.operators.spec.causal_conv import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

SPEC = recurrent_operator(
    "causal_conv_prefill",
    "y_t = silu(sum of w_i x_{t-i}) for every channel and new token",
    sizes=SIZES,
    work=WORK,
    swept=SWEPT,
)
