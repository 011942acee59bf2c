"""Residual stream converted to fp32 for a norm."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "norm_upcast",
    "y = x in fp32, and what a norm reads and writes more for it",
    width=Dim("hidden", "features"),
    # Two bytes read, four written, and two more read by the norm. Backward, the norm reads and
    # writes two more each, and its gradient is converted back.
    work=RowWork(num_flops=0, num_moved=4, num_saved=2, backward_work_ratio=1.25),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(512, 1024)),
)
