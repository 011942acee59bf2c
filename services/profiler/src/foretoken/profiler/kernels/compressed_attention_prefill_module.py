"""A whole block of compressed attention for new tokens, indexer included."""

from foretoken.profiler.attention.compressed import (
    bind_compressed_block,
    has_equal_sequences,
    make_compressed_block,
)
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="compressed_attention_prefill_module",
    source="torch.matmul, torch.topk and torch.softmax",
    make_inputs=make_compressed_block,
    bind=bind_compressed_block,
    can_run=has_equal_sequences,
)
