"""What tells devices apart, in addition to what their numbers make of a call."""

import numpy as np

from foretoken.domain.measurements.estimate import DType
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.roofline import FloatColumn, Target
from foretoken.predictor.transfer.device_law import DeviceLaw

_ELEMENT_BITS = {
    DType.FP32: 32,
    DType.TF32: 32,
    DType.FP16: 16,
    DType.BF16: 16,
    DType.FP8: 8,
    DType.INT8: 8,
    DType.FP4: 4,
    DType.INT4: 4,
}


def element_bits(dtype: DType) -> int:
    """Return how wide a number is: kernels of one width are alike, those of another are not."""
    return _ELEMENT_BITS[dtype]


def describe_device(target: Target) -> FloatColumn:
    """Return logarithms of what the data sheet says, for a number format, and of its ratios."""
    device = target.device
    peak = device.peak_flops(target.dtype)
    bandwidth = device.memory_bandwidth_bytes_per_s
    return np.log(
        [
            peak,
            bandwidth,
            peak / bandwidth,
            device.num_sms,
            peak / device.num_sms,
            device.l2_cache_bytes,
            device.clock_hz,
            device.tdp_w,
            device.launch_latency_us,
        ]
    )


def join_columns(design: Design, device: FloatColumn, law: DeviceLaw | None) -> Matrix:
    """Return what pooled trees see of calls on a device, `law` being what they correct."""
    columns = [design.features, design.transfer, np.tile(device, (design.num_rows, 1))]
    if law is not None:
        law_log = law.log_ratio(design)
        columns += [law_log[:, None], (law_log + np.log(design.base_us))[:, None]]
    return np.hstack(columns)
