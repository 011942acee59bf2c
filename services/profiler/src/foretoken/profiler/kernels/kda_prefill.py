"""Kimi delta attention over new tokens, in chunks of products."""

from foretoken.profiler.attention.delta_rule import FEATURE_CHUNK, bind_prefill, make_feature_inputs
from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="kda_prefill",
    source="torch.linalg.solve_triangular and torch.matmul, by chunk",
    make_inputs=make_feature_inputs,
    bind=lambda _: bind_prefill(FEATURE_CHUNK),
    can_run=has_equal_sequences,
)
