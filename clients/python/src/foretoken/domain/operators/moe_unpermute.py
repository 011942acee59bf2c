"""Add up what the experts made of every token, in the tokens' own order."""

from foretoken.domain.operators.moe_permute import (
    ROUTED_DIMS,
    permuted_bytes,
    same_traffic,
    sweep_routed,
)
from foretoken.domain.operators.spec.operator import OperatorSpec

SPEC = OperatorSpec(
    name="moe_unpermute",
    summary="sum over a token's experts, rows put back in order",
    group="moe",
    dims=ROUTED_DIMS,
    flops=lambda d, _: d["num_tokens"] * d["top_k"] * d["hidden"],
    moved_bytes=permuted_bytes,
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] * d["top_k"] / num_sms},
    sweep=sweep_routed,
    # Every row gets the gradient of its token.
    backward_work_ratio=1.0,
    # Router probabilities are applied in the activation, so a sum of rows keeps nothing.
    # Source: Megatron-Core 0.12 and later, weighted_bias_swiglu.
    saved_elements=lambda _: 0,
    proxy_operator=same_traffic,
)
