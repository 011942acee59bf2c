"""The short convolution before a recurrence: each channel over its last few tokens, then SiLU.

Its state is the tokens before the next one. Source: causal-conv1d (Dao, 2023).
"""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.recurrent import RecurrentWork, SweptSizes

SIZES = (
    Dim("channels", "features convolved on this device, of queries, keys and values together"),
    Dim("kernel_size", "tokens that an output sees, its own included"),
)
# SiLU: exponential, sum, quotient, product, as many as in `silu`.
_SILU_FLOPS = 4

WORK = RecurrentWork(
    token_flops=lambda d: d["channels"] * (2 * d["kernel_size"] + _SILU_FLOPS),
    token_elements=lambda d: 2 * d["channels"],
    state_elements=lambda d: d["channels"] * (d["kernel_size"] - 1),
    state_bytes=None,
    num_weights=lambda d: d["channels"] * d["kernel_size"],
    # Its input; backward, three tensors of that size are moved instead of two.
    # Source: causal-conv1d, `causal_conv1d_bwd` (SiLU is computed again from the input).
    saved_elements=lambda d: d["channels"],
    backward_work_ratio=1.5,
)
# Qwen3.5-9B's, whole and of one rank of eight, and a small one to try.
SWEPT = SweptSizes(
    quick={"channels": 64, "kernel_size": 4},
    full=({"channels": 8192, "kernel_size": 4}, {"channels": 1024, "kernel_size": 4}),
)
