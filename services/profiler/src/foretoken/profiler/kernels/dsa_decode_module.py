"""A whole block of sparse latent attention for one token per sequence, indexer included."""

from foretoken.profiler.attention.batch import read_decode_batch
from foretoken.profiler.attention.dsa import bind_dsa_block, make_dsa_block
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="dsa_decode_module",
    source="torch.matmul, torch.topk and torch.softmax",
    make_inputs=lambda dims, tensors: make_dsa_block(dims, read_decode_batch(dims), tensors),
    bind=lambda dims: bind_dsa_block(dims, read_decode_batch(dims)),
)
