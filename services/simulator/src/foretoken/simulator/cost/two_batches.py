"""Batches in two halves: what goes to experts and back hides behind the other half's computation.

An engine of at least so many tokens computes each half on its own: weights are read twice, and
while tokens of one half are on their way the other half computes. Only where there is more to send
than to compute something is left to wait for, and the first of all transfers hides behind nothing.
Attention is counted as in one batch: its time is close to linear in sequences. So is what a step
computes of prompts. That attention hides transfers as well is left out, for its time is not one of
the tokens; nor do transfers take multiprocessors from kernels here.
Source: DeepSeek-V3 Technical Report, sections 3.4.1 and 3.4.2; vLLM 0.19,
`v1/worker/gpu_ubatch_wrapper.py` and `check_ubatch_thresholds`; SGLang 0.5.9,
`srt/batch_overlap/two_batch_overlap.py`.
"""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.units import Quantity
from foretoken.simulator.cost.surface import Surface
from foretoken.simulator.grid import Floats, Ints

# Operators between ranks.
_BETWEEN_RANKS = "collective"


def count_halves(num_tokens: Quantity, least: int) -> Ints:
    """Return in how many parts engines compute so many tokens; `least` of 0 is one."""
    parts: Ints = 1 + ((num_tokens >= least) & (num_tokens > 1) & (least > 0)).astype(np.int64)
    return parts


def split_transfers(
    stages: Sequence[Sequence[OperatorNode]],
) -> tuple[list[list[OperatorNode]], list[list[OperatorNode]]]:
    """Return, of each stage, the operators between ranks and those that compute."""
    return (
        [[node for node in nodes if node.group == _BETWEEN_RANKS] for nodes in stages],
        [[node for node in nodes if node.group != _BETWEEN_RANKS] for nodes in stages],
    )


def waiting_ratio(
    sent_us: Floats, computed_us: Floats, num_parts: Ints, num_transfers: int
) -> Floats:
    """Return the share of the transfers that steps wait for: all of one part, the rest of two."""
    first_us = sent_us / (num_transfers * num_parts)
    left_us = np.maximum(sent_us - computed_us, first_us)
    waits_us = np.where(num_parts > 1, np.minimum(left_us, sent_us), sent_us)
    return np.divide(waits_us, sent_us, out=np.ones_like(waits_us), where=sent_us > 0)


def computed_us(tokens: Surface, groups: Sequence[str], num_tokens: Floats) -> Floats:
    """Return what computing so many tokens takes by [stage, point], of what depends on them."""
    kept = [index for index, group in enumerate(groups) if group != _BETWEEN_RANKS]
    total = tokens.values[:, kept].sum(axis=1)
    return np.stack([np.interp(num_tokens, tokens.axes[0], stage) for stage in total])
