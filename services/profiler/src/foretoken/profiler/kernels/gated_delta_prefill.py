"""The gated delta rule over new tokens, in chunks of products."""

from foretoken.profiler.attention.delta_rule import GATED_CHUNK, bind_prefill, make_gated_inputs
from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Kernel

KERNEL = Kernel(
    operator="gated_delta_prefill",
    source="torch.linalg.solve_triangular and torch.matmul, by chunk",
    make_inputs=make_gated_inputs,
    bind=lambda _: bind_prefill(GATED_CHUNK),
    can_run=has_equal_sequences,
)
