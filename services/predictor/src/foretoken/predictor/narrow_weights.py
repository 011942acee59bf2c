"""Products of weights in fewer bits than what they meet, where nobody measured such on the device.

Kernels that widen weights as they read them multiply in the format of the activations: of few rows
the weights' bytes are all that takes time, of many nothing is spared.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.estimate import (
    COVERED_PROVENANCES,
    LatencyColumns,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.variant import (
    format_variant,
    least_element_bytes,
    parse_variant,
    stored_dtype,
)
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.query_columns import Call
from foretoken.predictor.roofline import as_reals, compute_limits
from foretoken.predictor.source import Source, find_relatives
from foretoken.predictor.transfer.siblings import move_base

# Within which factor nine tenths of the times lie where bytes are spared, and where none are.
# Source: 12,096 products in INT4 and INT8 of TensorRT-LLM 1.0 on an A100, estimated from its BF16
# (AIConfigurator). Of up to 16 rows and at least 2^24 weights INT4 is 29 % off, 6 % too short in
# the median, INT8 17 and 3 %; times as in BF16 are 115 and 58 % off.
_SPARED_LOG, _UNSPARED_LOG = float(np.log(2.7)), float(np.log(1.35))


def find_whole(
    models: ModelSet, call: Call, wanted: Wanted, sources: Sequence[Source]
) -> Call | None:
    """Return the call with weights in the format of the activations, where that tells more.

    None where the weights are no narrower, or measurements of such weights answer: the sources, or
    the same engine's on other chips.
    """
    facts = parse_variant(call.table.variant)
    stored = stored_dtype(facts.pop("quant", ""))
    is_product = call.spec.group == "gemm" and call.table.phase is Phase.FORWARD
    if stored is None or not is_product or stored.num_bytes >= call.target.dtype.num_bytes:
        return None
    found = sources or find_relatives(models, call.spec, call.target, wanted)
    if found and "quant" in parse_variant(found[0].choice.head.key.variant):
        return None
    return replace(call, table=replace(call.table, variant=format_variant(facts) or ""))


def narrow(call: Call, whole: LatencyColumns) -> LatencyColumns:
    """Return what the call takes, from what it takes with weights as wide as the activations."""
    spec, wide_bytes, reals = call.spec, call.target.dtype.num_bytes, as_reals(call.columns)
    narrow_bytes = least_element_bytes(call.target.dtype, call.table.variant)
    spared_bytes = spec.num_weights(reals) * (wide_bytes - narrow_bytes)
    limits = compute_limits(spec, call.columns, call.target)
    left_us = limits.memory_us * (1.0 - spared_bytes / spec.moved_bytes(reals, wide_bytes))
    base_us = replace(limits, memory_us=left_us).base_us
    doubt_log = np.where(base_us < limits.base_us, _SPARED_LOG, _UNSPARED_LOG)
    moved = widen(move_base(whole, limits.base_us, base_us), doubt_log)
    is_covered = np.isin(moved.provenance, COVERED_PROVENANCES)
    return replace(
        moved,
        provenance=np.where(is_covered, Provenance.EXTRAPOLATED.value, moved.provenance),
        basis=f"{moved.basis}; weights of {8 * narrow_bytes:g} bits are read in their place",
    )
