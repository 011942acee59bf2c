"""Attention of one new token per sequence, with all contexts of equal length."""

from collections.abc import Mapping

from foretoken.profiler.attention import attend, attention_inputs, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    kv_len = split_evenly(dims["kv_tokens"], dims["num_seqs"])
    return attention_inputs(dims, dims["num_seqs"], (1, kv_len), tensors)


KERNEL = Kernel(
    operator="attention_decode",
    source="torch.nn.functional.scaled_dot_product_attention",
    make_inputs=_make_inputs,
    bind=lambda _: attend,
)
