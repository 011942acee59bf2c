"""Attention of one new token per sequence over a sliding window, with windows equally full.

The inputs hold the window alone. The cache before it is never read: it would take memory, and
hide from the rotation of inputs how little a call reads.
"""

from collections.abc import Mapping

from foretoken.profiler.attention import attend, attention_inputs, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    visible_len = split_evenly(dims["visible_tokens"], dims["num_seqs"])
    return attention_inputs(dims, dims["num_seqs"], (1, visible_len), tensors)


KERNEL = Kernel(
    operator="attention_decode_window",
    source="torch.nn.functional.scaled_dot_product_attention",
    make_inputs=_make_inputs,
    bind=lambda _: attend,
)
