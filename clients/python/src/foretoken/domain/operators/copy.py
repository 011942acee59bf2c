"""Tensor laid out anew in memory: made contiguous, concatenated, split."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "copy",
    "y = x, in another order of its dimensions",
    width=Dim("hidden", "features"),
    work=RowWork(num_flops=0, num_moved=2, num_saved=0, backward_work_ratio=1.0, is_strided=True),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(512, 1024)),
)
