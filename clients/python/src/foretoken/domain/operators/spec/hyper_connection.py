"""Hyper-connections: a few residual streams that each block mixes anew, for every token.

Before a block the streams are weighed into its input; after it, its output goes to all of them and
they mix by a matrix that Sinkhorn steps make doubly stochastic (mHC). The weights come from the
streams themselves, by one product in fp32.
Source: mHC: Manifold-Constrained Hyper-Connections (DeepSeek-AI, 2025), section 4.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, FeatureFormula
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two

STREAM_DIMS = (
    Dim("num_tokens", "tokens"),
    Dim("num_streams", "residual streams"),
    Dim("hidden", "model features of a stream"),
)

STREAM_COSTS: dict[str, FeatureFormula] = {
    "tokens": lambda d, _: d["num_tokens"],
    "streams": lambda d, _: d["num_tokens"] * d["num_streams"] * d["hidden"],
}
STREAM_FEATURES: dict[str, FeatureFormula] = {
    "rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms,
}


def sweep_streams(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield tokens through DeepSeek-V4's four streams, or a few through small ones."""
    yield from cross(
        num_tokens=pick(quick, (4, 32, 256), powers_of_two(1, 32768)),
        num_streams=(4,),
        hidden=pick(quick, (64,), (4096, 7168)),
    )
