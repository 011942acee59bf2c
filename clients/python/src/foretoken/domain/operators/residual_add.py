"""Sum of a sub-layer's output and the residual stream."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "residual_add",
    "y = x + residual",
    width=Dim("hidden", "features"),
    # Backward, the gradients of both branches are summed where the residual stream forked.
    work=RowWork(num_flops=1, num_moved=3, num_saved=0, backward_work_ratio=1.0),
    quick_sweep=QuickSweep(num_tokens=(1, 8, 64, 256, 1024), widths=(512, 1024)),
)
