"""Mamba's scan over new tokens, by doubling inside chunks."""

from foretoken.profiler.attention.channel_scan import CHUNK, bind_scan, make_inputs
from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="mamba_prefill",
    source="torch, by doubling",
    make_inputs=make_inputs,
    bind=lambda _: bind_scan(CHUNK),
    can_run=has_equal_sequences,
)
