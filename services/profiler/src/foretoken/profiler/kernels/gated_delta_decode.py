"""The gated delta rule for the next token of each sequence, or the few that a draft proposes."""

from foretoken.profiler.attention.delta_rule import make_gated_inputs, run_decode
from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="gated_delta_decode",
    source="torch.einsum",
    make_inputs=make_gated_inputs,
    bind=lambda _: run_decode,
    can_run=has_equal_sequences,
)
