"""Product of an activation and its gate, where both are kernels of their own."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "product",
    "y = x * gate",
    width=Dim("intermediate", "features"),
    # Backward, the gradient is multiplied with each factor.
    work=RowWork(num_flops=1, num_moved=3, num_saved=2, backward_work_ratio=2.0),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(704, 1408)),
)
