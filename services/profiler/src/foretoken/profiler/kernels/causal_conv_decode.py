"""The short causal convolution for the next token of each sequence."""

from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Kernel
from foretoken.profiler.kernels.causal_conv_prefill import SOURCE, make_conv_inputs, run_conv

KERNEL = Kernel(
    operator="causal_conv_decode",
    source=SOURCE,
    make_inputs=make_conv_inputs,
    bind=lambda _: run_conv,
    can_run=has_equal_sequences,
)
