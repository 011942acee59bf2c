"""Conversion of activations to 8 bit for a matrix product, and of their transpose."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "quantize",
    "y, y^T = x / scale in 8 bit",
    width=Dim("hidden", "features"),
    # Two bytes read, a byte written twice. Backward, the gradient is converted likewise.
    work=RowWork(num_flops=2, num_moved=2, num_saved=0, backward_work_ratio=1.0, is_strided=True),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(512, 1024)),
)
