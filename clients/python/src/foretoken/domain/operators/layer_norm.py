"""Layer normalisation with mean, variance, weight and bias."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "layer_norm",
    "y = (x - mean) / std * weight + bias",
    width=Dim("hidden", "features normalised together"),
    # Backward, one kernel reads input and gradient and writes a gradient, another reads both again
    # for the weights.
    work=RowWork(num_flops=7, num_moved=2, num_saved=1, num_weights=2, backward_work_ratio=2.5),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(512, 1024)),
)
