"""Mamba's update of the state for the next token of each sequence."""

from foretoken.profiler.attention.channel_scan import bind_scan, make_inputs
from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="mamba_decode",
    source="torch elementwise",
    make_inputs=make_inputs,
    bind=lambda _: bind_scan(1),
    can_run=has_equal_sequences,
)
