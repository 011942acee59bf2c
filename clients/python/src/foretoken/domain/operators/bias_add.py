"""Bias of a linear layer, added by a kernel of its own."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "bias_add",
    "y = x + bias",
    width=Dim("hidden", "features"),
    # Backward, the gradient is summed over the tokens: one read.
    work=RowWork(
        num_flops=1,
        num_moved=2,
        num_saved=0,
        num_weights=1,
        backward_work_ratio=0.5,
        is_strided=True,
    ),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(512, 1024)),
)
