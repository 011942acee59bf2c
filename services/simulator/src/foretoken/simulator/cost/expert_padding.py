"""Rows that experts compute besides those of their tokens.

DeepGEMM multiplies blocks of 128 rows, each of one expert, and the host does not know how many rows
an expert gets: vLLM makes room for the most, all but one row of a block more for each expert that a
rank holds, and computes it all. No table has that kernel; its blocks of padding take at most as
long as those of a plain product in the same format, which is what they are taken for.
Source: vLLM 0.12, fused_moe/deep_gemm_utils.py (compute_aligned_M), utils/deep_gemm.py
(is_deep_gemm_e8m0_used, true on Hopper: for batches of any size) and
quantization/fp8.py (get_fp8_moe_backend: on fewer than eight ranks of one expert).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import OperatorTable
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.simulator.cost.surface import SurfaceSpec

_ARCHITECTURE, _FORMAT = "hopper", "fp8_block"
_RANKS_MIN_WITHOUT = 8


def padding_tables(table: OperatorTable, spec: SurfaceSpec) -> Sequence[OperatorTable]:
    """Return how to ask about the padding of experts: two products, or none."""
    layout = spec.layout
    is_padded = (
        spec.expert_block_rows > 0
        and parse_variant(table.variant).get("quant") == _FORMAT
        and find_device(spec.device).architecture == _ARCHITECTURE
        and (layout.ep > 1 or layout.tp * layout.dp < _RANKS_MIN_WITHOUT)
    )
    if not is_padded:
        return ()
    columns = {name: np.asarray(column) for name, column in table.columns.items()}
    num_experts = columns.get("num_local_experts", columns["num_experts"])
    hidden, intermediate = columns["hidden"], columns["intermediate"]
    rows = num_experts * (spec.expert_block_rows - 1)
    return tuple(
        replace(
            table,
            operator="gemm",
            columns={"m": rows, "n": n, "k": k},
            variant=format_variant({"quant": _FORMAT}) or "",
            kernel="",
            tentative=True,
        )
        for n, k in ((2 * intermediate, hidden), (hidden, intermediate))
    )
