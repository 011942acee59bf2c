"""Between which times a kernel lies that streams rows through memory, where nobody measured it.

What other operators and devices make of it may be anything; what a device's memory carries, and the
least that kernels of this kind reach of it, bounds every such answer.
"""

from dataclasses import replace

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.units import US_PER_S
from foretoken.predictor.features import Design
from foretoken.predictor.transfer.support import UNMEASURED_DEVICE_LOG

# The cost that tells operators over rows, which are one kernel (see `row_operator`).
_ROW_COST = "wave_features"

# Nine tenths of such calls take between so many times their base latency. Source: GELU, layer and
# RMS norm, gated SiLU, sums and the two parts of a conversion to 8 bit, forward and backward, 40
# series of eight GPUs (Vidur, GPUModeling, AIConfigurator) with one voice an operator; SGLang's
# conversion, a chain of kernels, takes 11 to 21 times as long and is left out. Of calls that move
# more than twice the cache 0.95 to 2.9; what lies in the cache is faster, and not slower (2.1 to
# 2.9 by size).
_LEAST_RATIO, _MOST_RATIO = 0.95, 3.0
_CACHES = 2.0
_FROM_ELSEWHERE = (Provenance.TRANSFERRED.value, Provenance.ANALYTICAL.value)


def is_row_operator(spec: OperatorSpec) -> bool:
    """Tell whether an operator treats all rows alike in one pass through memory."""
    return _ROW_COST in spec.costs


def hold_to_memory(
    spec: OperatorSpec, device: DeviceSpec, design: Design, found: LatencyColumns
) -> LatencyColumns:
    """Return estimates of one kernel over rows with bounds in the band, where nobody measured it.

    Calls of which a launch is the greater part are left as they are, and those that are themselves
    estimated outside of the band.
    """
    if not is_row_operator(spec) or device.kind != "gpu":
        return found
    latency_us = np.asarray(found.latency_us)
    moved_bytes = design.roofline_us * device.memory_bandwidth_bytes_per_s / US_PER_S
    is_beyond_cache = moved_bytes > _CACHES * device.l2_cache_bytes
    least_us = np.where(is_beyond_cache, _LEAST_RATIO * design.base_us, 0.0)
    most_us = _MOST_RATIO * design.base_us
    is_held = np.isin(found.provenance, _FROM_ELSEWHERE) & (
        2.0 * design.roofline_us > design.base_us
    )
    is_held &= (latency_us >= least_us) & (latency_us <= most_us)
    least_us = np.minimum(least_us, latency_us * np.exp(-UNMEASURED_DEVICE_LOG))
    most_us = np.maximum(most_us, latency_us * np.exp(UNMEASURED_DEVICE_LOG))
    return replace(
        found,
        low_us=np.where(is_held, np.maximum(found.low_us, least_us), found.low_us),
        high_us=np.where(is_held, np.minimum(found.high_us, most_us), found.high_us),
    )
