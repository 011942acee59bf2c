"""What the exponentials of attention take, whose units did not grow with the matrix units.

No kernel of exact attention is faster than them, and on a B200 they take about as long as the
products of heads of 128 in BF16, twice as long in FP8. The roofline of operators does not count
them; what one device shows of another has to, where only one of both waits for them.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.units import US_PER_S
from foretoken.predictor.features import Design

# Exponentials of an SM in a clock, by architecture. Source: NVIDIA, CUDA C++ programming guide,
# throughput of native arithmetic instructions, base-2 exponentials of compute capability 8.0, 8.9,
# 9.0, 10.0 and 12.0; FlashAttention-4 (arXiv 2603.05451) has the same of H100 and B200.
_PER_CLOCK: Mapping[str, int] = {"ampere": 16, "ada": 16, "hopper": 16, "blackwell": 16}
# Source: NVIDIA, "Making Softmax More Efficient with NVIDIA Blackwell Ultra": twice Blackwell's.
_TWICE = frozenset({"b300", "gb300"})
_GROUP, _COUNTS = "attention", ("score_pairs", "num_heads")


def hold_to_exponentials(spec: OperatorSpec, device: DeviceSpec, design: Design) -> Design:
    """Return a design whose arithmetic takes no less than the exponentials that belong to it."""
    per_clock = _PER_CLOCK.get(device.architecture, 0)
    if spec.group != _GROUP or not per_clock or not set(_COUNTS) <= set(spec.dim_names):
        return design
    if device.name in _TWICE:
        per_clock *= 2
    pairs, heads = (design.points[:, spec.dim_names.index(name)] for name in _COUNTS)
    per_s = per_clock * device.num_sms * device.clock_hz
    exponentials_us = pairs.astype(float) * heads / per_s * US_PER_S
    work = design.work.copy()
    _, floor_us, compute_us, memory_us = work[:, :4].T
    compute_us = np.maximum(compute_us, exponentials_us)
    roofline_us = np.maximum(compute_us, memory_us)
    work[:, 0], work[:, 2] = floor_us + roofline_us, compute_us
    return replace(design, work=work, roofline_us=roofline_us, base_us=work[:, 0].copy())
