"""Exchanges of tokens with experts by kernels of their own, as variants of an all-to-all.

Which kernels these are, and whether they bring tokens or what experts made of them, says the
variant; what is sent, the bytes.
"""

import enum
from collections.abc import Mapping

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import Quantity, ceil_divide

# DeepEP's kernels that send a token once for each of its experts.
LOW_LATENCY = "deepep_low_latency"
# They have a multiprocessor for each expert; of fewer than these few send, and times are others.
# Source: deepseek-ai/DeepEP, `num_warp_groups` in csrc/kernels/internode_ll.cu.
LEAST_EXPERTS = 128
# Features of a token that share a scale in FP8 blocks. Source: DeepSeek-V3, section 3.3.
_SCALED_FEATURES = 128


class ExchangePart(enum.StrEnum):
    """Which way an exchange goes."""

    DISPATCH = enum.auto()
    COMBINE = enum.auto()


def exchange_facts(kernels: str, num_experts: int, part: ExchangePart) -> Mapping[str, str]:
    """Return the facts of a variant, none where a plain all-to-all answers."""
    if kernels != LOW_LATENCY or num_experts < LEAST_EXPERTS:
        return {}
    return {"exchange": kernels, "part": part.value}


def scaled_bytes(width: Quantity) -> Quantity:
    """Return the bytes of so many features in FP8 blocks, with their scales."""
    return width + ceil_divide(width, _SCALED_FEATURES) * DType.FP32.num_bytes
