"""Mamba2's scan over new tokens, in chunks of products."""

from functools import partial

from foretoken.profiler.attention.recurrence import has_equal_sequences, scan_chunks
from foretoken.profiler.attention.selective_scan import CHUNK, bind_scan, make_inputs
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="mamba2_prefill",
    source="torch.matmul, by chunk",
    make_inputs=make_inputs,
    bind=lambda _: bind_scan(partial(scan_chunks, chunk=CHUNK)),
    can_run=has_equal_sequences,
)
