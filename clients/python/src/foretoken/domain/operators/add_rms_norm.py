"""Residual addition and RMS normalisation in one kernel, as vLLM and SGLang run them."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

SPEC = row_operator(
    "add_rms_norm",
    "residual += x; y = residual / rms(residual) * weight",
    width=Dim("hidden", "features normalised together"),
    work=RowWork(num_flops=5, num_moved=4, num_saved=1, num_weights=1, backward_work_ratio=2.0),
    quick_sweep=QuickSweep(num_tokens=(1, 32, 1024), widths=(512, 1024)),
)
