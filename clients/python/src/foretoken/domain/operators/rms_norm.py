"""Root-mean-square normalisation over the hidden dimension."""

from foretoken.domain.operators.spec.operator import Dim
from foretoken.domain.operators.spec.row import QuickSweep, RowWork, row_operator

# Six operators forward and fourteen backward. Source: GPUModeling's tables of fp16 on A100 (5.4 and
# 12.7 times as long as additions there need for what one kernel moves) and GH200 (7.2 and 14.6).
_CHAIN_RATIOS = (6.2, 13.6)

SPEC = row_operator(
    "rms_norm",
    "y = x / rms(x) * weight",
    width=Dim("hidden", "features normalised together"),
    work=RowWork(
        num_flops=4,
        num_moved=2,
        num_saved=1,
        num_weights=1,
        backward_work_ratio=2.0,
        chain_ratios=_CHAIN_RATIOS,
        chain_kernels=(6, 14),
    ),
    quick_sweep=QuickSweep(num_tokens=(1, 8, 64, 256, 1024), widths=(512, 1024)),
)
