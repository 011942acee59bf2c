"""Chains of operators that eager PyTorch runs in place of one kernel, where none was measured."""

from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable, Phase
from foretoken.domain.operators.spec.variant import EAGER_VARIANT
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.query_columns import Call

# How far the ratio is apart between devices. Source: that of A100 to GH200 is 1.15 to 1.6 (see the
# `chain_ratios` of norms and rotary embeddings).
_CHAIN_LOG = float(np.log(1.3))


def lengthen(call: Call, found: LatencyColumns, measured: str = "") -> LatencyColumns:
    """Return what one kernel takes as long as its chain takes, where a chain is asked for.

    `measured` is the variant that the answer is of.
    """
    ratio = _ratio(call, call.table.phase)
    if ratio == 1.0 or measured == EAGER_VARIANT:
        return found
    longer = replace(
        found,
        latency_us=np.asarray(found.latency_us) * ratio,
        low_us=np.asarray(found.low_us) * ratio,
        high_us=np.asarray(found.high_us) * ratio,
        basis=f"{found.basis}; a chain of kernels takes {ratio:g} times as long",
    )
    return widen(longer, _CHAIN_LOG)


def is_chain(table: OperatorTable) -> bool:
    """Tell whether a chain is asked for in place of one kernel."""
    return table.variant == EAGER_VARIANT


def backward_ratio(call: Call) -> float:
    """Return the time of a backward pass over that of the forward pass, by work and as a chain."""
    spec = call.spec
    chains = _ratio(call, Phase.BACKWARD) / _ratio(call, Phase.FORWARD)
    return spec.work_ratio(call.table.phase) * chains


def _ratio(call: Call, phase: Phase) -> float:
    if not is_chain(call.table):
        return 1.0
    return call.spec.chain_ratios[phase is Phase.BACKWARD]
