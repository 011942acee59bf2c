"""Hyper-connections before a block: how the streams mix, and the block's input made of them."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.hyper_connection import (
    STREAM_COSTS,
    STREAM_DIMS,
    STREAM_FEATURES,
    sweep_streams,
)
from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.units import Quantity, ceil_divide

# The mixing weights are fp32.
_WEIGHT_BYTES = 4
# Each Sinkhorn step sums and divides rows, then columns.
_SINKHORN_FLOPS = 4


def _num_mixes(d: Dims) -> Quantity:
    """Return the numbers that mix a token's streams: in, out, and among each other."""
    return d["num_streams"] * (2 + d["num_streams"])


def _num_weights(d: Dims) -> Quantity:
    return d["num_streams"] * d["hidden"] * _num_mixes(d)


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    sinkhorn = _SINKHORN_FLOPS * d["sinkhorn_steps"] * d["num_streams"] * d["num_streams"]
    # The product, the squares of the norm before it, and the weighed sum of the streams.
    return d["num_tokens"] * (2 * _num_weights(d) + 4 * d["num_streams"] * d["hidden"] + sinkhorn)


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    elements = d["num_tokens"] * (d["num_streams"] + 1) * d["hidden"]
    mixes = d["num_tokens"] * _num_mixes(d) + _num_weights(d)
    return elements * element_bytes + mixes * _WEIGHT_BYTES


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for dims in sweep_streams(quick):
        yield {**dims, "sinkhorn_steps": 20}


SPEC = OperatorSpec(
    name="mhc_pre",
    summary="x = sum of a_i s_i over the streams s, and the weights that mix them after the block",
    dims=(*STREAM_DIMS, Dim("sinkhorn_steps", "steps that make the mixing doubly stochastic")),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features=STREAM_FEATURES,
    costs={
        **STREAM_COSTS,
        "row_blocks": lambda d, _: ceil_divide(d["num_tokens"], 64) * d["hidden"],
        "waves": lambda d, num_sms: ceil_divide(ceil_divide(d["num_tokens"], 64), num_sms),
    },
    sweep=_sweep,
    num_weights=_num_weights,
)
