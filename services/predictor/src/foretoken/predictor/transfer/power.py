"""The rate that power allows a device for as long as a training step lasts."""

from dataclasses import replace

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import Design

_MATRIX_PRODUCTS = "gemm"
# Column of a design's work that holds the time at the peak rate.
_COMPUTE = 2


def limit_to_sustained(
    estimates: LatencyColumns, spec: OperatorSpec, device: DeviceSpec, design: Design
) -> LatencyColumns:
    """Return estimates of transferred times, no faster than the device's power allows.

    Other devices, or the same chip in another product, were timed in bursts too short to heat up.
    """
    if not device.sustained_flops_ratio or spec.group != _MATRIX_PRODUCTS:
        return estimates
    least_us = design.work[:, _COMPUTE] / device.sustained_flops_ratio
    latency_us = np.maximum(estimates.latency_us, least_us)
    stretch = latency_us / estimates.latency_us
    return replace(
        estimates,
        latency_us=latency_us,
        low_us=np.minimum(np.maximum(estimates.low_us, design.work[:, _COMPUTE]), latency_us),
        high_us=estimates.high_us * stretch,
    )
