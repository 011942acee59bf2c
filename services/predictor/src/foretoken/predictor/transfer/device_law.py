"""What a device reaches of its data sheet: a law of few parameters, estimated from few points.

The parameters mean the same on every device, so that a handful of points places a device among
those known: its launch floor, the shares of peak and of bandwidth that it reaches, how much faster
data in its second-level cache are, how large that cache is in effect, how far computing hides
behind moving data, and the time below which work does not fill the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import NUM_ROOFLINE_PARTS, Design
from foretoken.predictor.roofline import FloatColumn

# Logarithms of the parameters where nothing is measured, and how far devices lie apart. Source:
# the law fitted to the GEMM tables in 16-bit formats of A100, H200, L40S and GB200.
_TYPICAL = np.array([0.2, np.log(1.3), np.log(1.15), 0.3, -0.5, np.log(3.0), 0.0])
_SPREAD = np.array([0.3, 0.3, 0.2, 0.6, 0.7, 0.5, 1.5])
# What the law leaves over, in log units, on tables of thousands of points.
_NOISE_LOG = 0.1
_TINY_US = 1e-9
# Part of the identity of what is learned over a law: raise it when its parameters' meaning changes.
LAW_REVISION = 2
# More points do not move seven parameters.
_MAX_ROWS = 1_500
_MAX_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class DeviceLaw:
    """Seven logarithms: floor, compute, memory, cache speed, cache size, hiding, fill time."""

    parameters: FloatColumn

    def log_ratio(self, design: Design) -> FloatColumn:
        """Return log(law / base latency) of every call."""
        floor, compute, memory, speed, size, hiding, fill = self.parameters
        _, floor_us, compute_us, memory_us = design.work[:, :NUM_ROOFLINE_PARTS].T
        in_cache = 1.0 / (1.0 + np.exp(2.0 * (design.transfer[:, 2] - size)))
        memory_us = memory_us * np.exp(memory) * (1.0 - in_cache * (1.0 - np.exp(-speed)))
        compute_us = compute_us * np.exp(compute)
        fill_us = np.exp(fill)
        compute_us = compute_us - fill_us * np.expm1(-compute_us / fill_us)
        log_parts = np.log(np.stack([compute_us, memory_us]) + _TINY_US)
        # The larger part taken out first: powers of times overflow.
        largest = log_parts.max(axis=0)
        power = np.exp(hiding)
        body_us = np.exp(
            largest + np.log(np.exp(power * (log_parts - largest)).sum(axis=0)) / power
        )
        return np.asarray(np.log((floor_us * np.exp(floor) + body_us) / design.base_us))


TYPICAL_LAW = DeviceLaw(_TYPICAL)


def average_laws(laws: Sequence[DeviceLaw]) -> DeviceLaw:
    """Return the law in the middle of others."""
    return DeviceLaw(np.median([law.parameters for law in laws], axis=0))


def fit_device_law(
    design: Design, log_ratio: FloatColumn, expected: DeviceLaw = TYPICAL_LAW
) -> DeviceLaw:
    """Return the law nearest to the points, and to the expected one as far as they are few."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    if not design.num_rows:
        return expected
    if design.num_rows > _MAX_ROWS:
        rows = np.random.default_rng(0).choice(design.num_rows, _MAX_ROWS, replace=False)
        design, log_ratio = design.take(rows), log_ratio[rows]

    def deviation(parameters: FloatColumn) -> FloatColumn:
        error = (log_ratio - DeviceLaw(parameters).log_ratio(design)) / _NOISE_LOG
        return np.concatenate([error, (parameters - expected.parameters) / _SPREAD])

    # Kernels that are far off what others reach should not bend the law.
    found = least_squares(
        deviation,
        expected.parameters,
        loss="soft_l1",
        x_scale=_SPREAD,
        max_nfev=_MAX_ROUNDS,
        diff_step=1e-3,
    )
    return DeviceLaw(np.asarray(found.x))
