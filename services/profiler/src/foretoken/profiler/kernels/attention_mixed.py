"""A mixed batch as torch runs it: one kernel for the prefills, then one for the decodes."""

from collections.abc import Mapping

import torch

from foretoken.profiler.attention import attend, attention_inputs, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

_NUM_PREFILL_INPUTS = 4


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_seqs, num_decode_seqs = dims["num_seqs"], dims["num_decode_seqs"]
    q_len = split_evenly(dims["q_tokens"], num_seqs)
    kv_len = split_evenly(dims["kv_tokens"], num_seqs)
    decode_kv_len = split_evenly(dims["decode_kv_tokens"], num_decode_seqs)
    return (
        *attention_inputs(dims, num_seqs, (q_len, kv_len), tensors),
        *attention_inputs(dims, num_decode_seqs, (1, decode_kv_len), tensors),
    )


def _run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(*inputs[:_NUM_PREFILL_INPUTS]), attend(*inputs[_NUM_PREFILL_INPUTS:])


KERNEL = Kernel(
    operator="attention_mixed",
    source="torch.nn.functional.scaled_dot_product_attention x2",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
