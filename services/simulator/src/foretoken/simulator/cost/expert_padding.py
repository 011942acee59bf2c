"""What experts in blocks of FP8 run on Hopper: another kernel, rows besides those of their tokens.

DeepGEMM multiplies blocks of 128 rows, each of one expert, and the host does not know how many rows
an expert gets: vLLM makes room for the most, all but one row of a block more for each expert that a
rank holds, and computes it all: the products, the activation and the conversion after it. The rows
of padding are multiplied by the first expert, whose weights stay in the cache.

No table has that kernel. Its products take at least what the padding takes as plain ones in the
same format, and what experts without it take, which mostly read weights: a block of 128 rows is
computed about as long as its expert is read. They take at most both. The answer is in the middle.
Source: vLLM 0.12, fused_moe/deep_gemm_utils.py (compute_aligned_M, `expert_ids_init`),
deep_gemm_moe.py (DeepGemmExperts.apply), utils/deep_gemm.py (is_deep_gemm_e8m0_used, true on
Hopper: for batches of any size) and quantization/fp8.py (get_fp8_moe_backend: on fewer than eight
ranks of one expert).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.frameworks.deep_gemm import ARCHITECTURE, FORMAT
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.simulator.cost.surface import SurfaceSpec

_RANKS_MIN_WITHOUT = 8


def kernel_tables(table: OperatorTable, spec: SurfaceSpec) -> Sequence[OperatorTable]:
    """Return how to ask about experts of the kernel that an engine has for them, if it is known."""
    is_known = (
        spec.expert_block_kernel
        and not table.kernel
        and table.operator == "moe_experts"
        and _is_in_blocks(table, spec)
    )
    return (replace(table, kernel=spec.expert_block_kernel, tentative=True),) if is_known else ()


def _is_in_blocks(table: OperatorTable, spec: SurfaceSpec) -> bool:
    is_hopper = find_device(spec.device).architecture == ARCHITECTURE
    return is_hopper and parse_variant(table.variant).get("quant") == FORMAT


def padding_tables(table: OperatorTable, spec: SurfaceSpec) -> Sequence[OperatorTable]:
    """Return how to ask about the padding of experts, or nothing where there is none.

    Two products, then the activation and the conversion between them.
    """
    layout = spec.layout
    is_padded = (
        spec.expert_block_rows > 0
        and _is_in_blocks(table, spec)
        and (layout.ep > 1 or layout.tp * layout.dp < _RANKS_MIN_WITHOUT)
    )
    if not is_padded:
        return ()
    columns = {name: np.asarray(column) for name, column in table.columns.items()}
    num_experts = columns.get("num_local_experts", columns["num_experts"])
    hidden, intermediate = columns["hidden"], columns["intermediate"]
    rows = num_experts * (spec.expert_block_rows - 1)
    product = replace(
        table,
        operator="gemm",
        variant=format_variant({"quant": FORMAT}) or "",
        kernel="",
        tentative=True,
    )
    other = replace(product, variant="", dtype=spec.options.dtype)
    return (
        *(
            replace(product, columns={"m": rows, "n": n, "k": k})
            for n, k in ((2 * intermediate, hidden), (hidden, intermediate))
        ),
        replace(
            other, operator="silu_mul", columns={"num_tokens": rows, "intermediate": intermediate}
        ),
        replace(other, operator="quantize", columns={"num_tokens": rows, "hidden": intermediate}),
    )


def add_padding(experts: LatencyColumns, padding: Sequence[LatencyColumns]) -> LatencyColumns:
    """Return experts with the answers to `padding_tables`."""
    products_us = sum(np.asarray(answer.latency_us) for answer in padding[:2])
    others_us = sum(np.asarray(answer.latency_us) for answer in padding[2:])
    least_us = np.maximum(experts.latency_us, products_us) + others_us
    most_us = experts.latency_us + products_us + others_us
    return replace(
        experts,
        latency_us=np.sqrt(least_us * most_us),
        # Plain products may take longer than these.
        low_us=experts.low_us,
        high_us=experts.high_us + sum(np.asarray(answer.high_us) for answer in padding),
    )
