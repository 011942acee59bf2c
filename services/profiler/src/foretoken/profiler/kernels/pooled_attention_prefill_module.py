"""A whole block of latent attention to pools for new tokens, indexer included."""

from foretoken.profiler.attention.batch import read_prefill_batch
from foretoken.profiler.attention.pooled import bind_pooled_block, make_pooled_block
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="pooled_attention_prefill_module",
    source="torch.matmul, torch.topk and torch.softmax",
    make_inputs=lambda dims, tensors: make_pooled_block(dims, read_prefill_batch(dims), tensors),
    bind=lambda dims: bind_pooled_block(dims, read_prefill_batch(dims)),
)
