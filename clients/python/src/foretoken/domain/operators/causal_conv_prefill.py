"""The short causal convolution over the new tokens of each sequence."""

from dataclasses import replace

from foretoken.domain.operators.spec.causal_conv import SIZES, SWEPT, WORK
from foretoken.domain.operators.spec.recurrent import recurrent_operator

# Which sequences have a state, and the convolution. Source: SGLang 0.5.9,
# layers/attention/hybrid_linear_attn_backend.py (GDNAttnBackend.forward_extend).
_LAUNCHES = 2

SPEC = replace(
    recurrent_operator(
        "causal_conv_prefill",
        "y_t = silu(sum of w_i x_{t-i}) for every channel and new token",
        sizes=SIZES,
        work=WORK,
        swept=SWEPT,
    ),
    num_launches=_LAUNCHES,
)
