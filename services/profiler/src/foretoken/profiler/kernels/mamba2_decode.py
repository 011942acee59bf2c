"""Mamba2's update of the state for the next token of each sequence."""

from foretoken.profiler.attention.recurrence import has_equal_sequences, step_tokens
from foretoken.profiler.attention.selective_scan import bind_scan, make_inputs
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="mamba2_decode",
    source="torch.einsum",
    make_inputs=make_inputs,
    bind=lambda _: bind_scan(step_tokens),
    can_run=has_equal_sequences,
)
