"""Times of bursts and of long runs: what was timed for long is kept, and learned, as a burst."""

from dataclasses import replace

import numpy as np

from foretoken.domain.hardware.roofline import RooflineTerms
from foretoken.domain.hardware.sustained import (
    MATRIX_GROUPS,
    SLOWED_SPREAD_LOG,
    burst_ratio,
    slowed_ratio,
)
from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, Provenance
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.query_columns import Call
from foretoken.predictor.roofline import Columns, FloatColumn, Target, compute_limits


def to_burst_us(
    spec: OperatorSpec, columns: Columns, target: Target, sustained_us: FloatColumn
) -> FloatColumn:
    """Return what calls take once, in µs, that were timed for so long that power slowed them."""
    if spec.group not in MATRIX_GROUPS:
        return sustained_us
    terms = _terms(spec, columns, target)
    ratio = burst_ratio(target.device, target.dtype, terms, sustained_us)
    return np.asarray(sustained_us / ratio)


def sustain(call: Call, query: LatencyQuery, found: LatencyColumns) -> LatencyColumns:
    """Return estimates as they are in what runs for long, at the power that the query limits to.

    What power slows is no longer measured, and as uncertain as how much it does.
    """
    if not query.sustained or call.spec.group not in MATRIX_GROUPS:
        return found
    device, dtype = call.target.device, call.target.dtype
    terms = _terms(call.spec, call.columns, call.target)
    latency_us = np.asarray(found.latency_us)
    ratio = slowed_ratio(device, dtype, terms, latency_us, query.power_limit_w)
    if device.sustained_flops_ratio:
        least_us = terms.compute_us / device.sustained_flops_ratio
        ratio = np.maximum(ratio, least_us / latency_us)
    is_slowed = ratio > 1.0
    if not is_slowed.any():
        return found
    is_measured = found.provenance == Provenance.MEASURED.value
    slowed = replace(
        found,
        latency_us=latency_us * ratio,
        low_us=np.asarray(found.low_us) * ratio,
        high_us=np.asarray(found.high_us) * ratio,
    )
    slowed = widen(slowed, np.where(is_slowed, SLOWED_SPREAD_LOG, 0.0))
    return replace(
        slowed,
        # A call that power slows less than estimated takes what it takes in a burst.
        low_us=np.maximum(slowed.low_us, found.low_us),
        provenance=np.where(
            is_measured & is_slowed, Provenance.INTERPOLATED.value, found.provenance
        ),
        basis=f"{found.basis}; as fast as power allows for long",
    )


def _terms(spec: OperatorSpec, columns: Columns, target: Target) -> RooflineTerms:
    limits = compute_limits(spec, columns, target)
    return RooflineTerms(limits.compute_us, limits.memory_us, 0.0)
