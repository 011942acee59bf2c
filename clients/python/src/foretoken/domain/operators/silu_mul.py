"""Gated activation of SwiGLU MLPs."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "silu_mul",
    "y = silu(gate) * up, from one [tokens, 2*intermediate] input",
    width=Dim("intermediate", "features of the output"),
    work=RowWork(num_flops=5, num_moved=3, num_saved=2, backward_work_ratio=1.67),
    quick_sweep=QuickSweep(num_tokens=(1, 8, 64, 256, 1024), widths=(704, 1408)),
)
