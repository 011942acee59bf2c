"""Estimates that no measurement of the device is near to: from typical efficiencies."""

from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.predictor.features import Design
from foretoken.predictor.query_columns import Call
from foretoken.predictor.roofline import FloatColumn, IntColumn
from foretoken.predictor.trainer import MIN_ROOFLINE_RATIO
from foretoken.predictor.transfer import TransferModel


def from_transfer(transfer: TransferModel, call: Call, design: Design) -> LatencyColumns:
    """Return what typical efficiencies say."""
    spec, support = call.spec, transfer.support
    provenance = (
        Provenance.TRANSFERRED if support.has_measured(spec) else Provenance.ANALYTICAL
    ).value
    floor_us = find_floor_us(call, design)
    latency_us = np.maximum(design.base_us * np.exp(transfer.predict(design)), floor_us)
    low_us = np.maximum(latency_us * np.exp(transfer.low_log), floor_us)
    high_us = latency_us * np.exp(transfer.high_log)
    estimates = pack(latency_us, low_us, high_us, np.full(design.num_rows, provenance))
    return replace(estimates, basis=support.describe(spec, call.target.device))


def find_floor_us(call: Call, design: Design) -> FloatColumn:
    """Return the least that calls are ever estimated to take."""
    return MIN_ROOFLINE_RATIO * call.read_ratio * design.roofline_us


def pack(
    latency_us: FloatColumn, low_us: FloatColumn, high_us: FloatColumn, provenance: IntColumn
) -> LatencyColumns:
    """Return estimates that no measured point is near to."""
    return LatencyColumns(
        latency_us=latency_us,
        low_us=np.minimum(low_us, latency_us),
        high_us=np.maximum(high_us, latency_us),
        provenance=provenance.astype(np.int64),
        nearest_us=np.zeros(len(latency_us)),
        nearest_octaves=np.full(len(latency_us), np.inf),
    )


def limit_doubt(estimates: LatencyColumns, transfer: TransferModel) -> LatencyColumns:
    """Return the estimates with extrapolated bounds no wider than transferred ones are.

    Uncertainty grows with the distance to the nearest measurement, but whoever knows measurements
    is not less sure than one who knows none.
    """
    is_beyond = estimates.provenance == Provenance.EXTRAPOLATED.value
    low_us = estimates.latency_us * np.exp(transfer.low_log)
    high_us = estimates.latency_us * np.exp(transfer.high_log)
    return replace(
        estimates,
        low_us=np.where(is_beyond, np.maximum(estimates.low_us, low_us), estimates.low_us),
        high_us=np.where(is_beyond, np.minimum(estimates.high_us, high_us), estimates.high_us),
    )
