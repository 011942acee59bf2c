"""A whole block of block-sparse attention for one token per sequence, indexer included."""

from foretoken.profiler.attention.batch import read_decode_batch
from foretoken.profiler.attention.msa import bind_msa_block, make_msa_block
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="msa_decode_module",
    source="torch.matmul, torch.topk and torch.softmax",
    make_inputs=lambda dims, tensors: make_msa_block(dims, read_decode_batch(dims), tensors),
    bind=lambda dims: bind_msa_block(dims, read_decode_batch(dims)),
)
