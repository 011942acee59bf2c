"""Hyper-connections after a block: the streams mixed, and the block's output added to each."""

from foretoken.domain.operators.spec.hyper_connection import (
    STREAM_COSTS,
    STREAM_DIMS,
    STREAM_FEATURES,
    sweep_streams,
)
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.units import ceil_divide

SPEC = OperatorSpec(
    name="mhc_post",
    summary="s_i = sum of m_ij s_j over the streams + b_i x",
    dims=STREAM_DIMS,
    flops=lambda d, _: (
        2 * d["num_tokens"] * d["num_streams"] * (d["num_streams"] + 1) * d["hidden"]
    ),
    moved_bytes=lambda d, element_bytes: (
        d["num_tokens"] * (2 * d["num_streams"] + 1) * d["hidden"] * element_bytes
    ),
    features=STREAM_FEATURES,
    costs={
        **STREAM_COSTS,
        "waves": lambda d, num_sms: ceil_divide(d["num_tokens"], num_sms) * d["hidden"],
    },
    sweep=sweep_streams,
)
