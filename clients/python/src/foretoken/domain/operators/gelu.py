"""Ungated activation of classic MLPs."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "gelu",
    "y = gelu(x)",
    width=Dim("intermediate", "features"),
    work=RowWork(
        num_flops=8, num_moved=2, num_saved=1, backward_work_ratio=1.5, chain_kernels=(8, 11)
    ),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(704, 1408)),
)
