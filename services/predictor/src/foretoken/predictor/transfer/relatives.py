"""Devices of other chips that ran the same engine, where nobody measured the chip asked about.

How one kernel's time changes with its sizes is nearer to what another chip shows of the same
engine than to what is typical of the operator. So each such device has a say, moved by what data
sheets make of the very call, and so has the law that it follows of its data sheet: the more like
it is, the weightier. What is typical of the operator stays with a quarter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType, LatencyColumns, Provenance
from foretoken.predictor.features import Design
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.series import Series
from foretoken.predictor.transfer.device_columns import element_bits
from foretoken.predictor.transfer.device_law import DeviceLaw, fit_device_law
from foretoken.predictor.transfer.exponentials import hold_to_exponentials
from foretoken.predictor.transfer.own_points import Places, Reference

# Source of all that follows: GEMM, attention and experts under vLLM, SGLang and TensorRT-LLM in
# BF16 and FP8, 86 tables, each estimated without its chip: an A100, an H100 with the H200, an L40S
# and an RTX PRO 6000, of which no B200 was among the devices known. The mean error by operator was
# 25, 23, 30 and 24 % with two chips, and is 44, 33, 40 and 31 % of what is typical; 76 of 86 tables
# gain.
GROUPS = frozenset({"gemm", "attention", "moe"})
# What they run of an engine are one vendor's kernels; other vendors' say nothing of them.
_ARCHITECTURES = frozenset({"ampere", "ada", "hopper", "blackwell"})
MAX_RELATIVES = 2
# How far apart two devices' logarithms of the time that fills the last cache from memory are where
# the weight of one is half of that of a device which is as far. Of bandwidth, peak, their ratios
# and those to the SMs this tells best who is alike: an A100 and an H100, an L40S and an RTX PRO.
_LIKE_LOG = 0.3
# The shares of what is typical, of the devices' laws and of what they show of the very call.
_SHARES = (0.25, 0.25, 0.5)
# Nine tenths of truths lie within this many times the spread of the three, joined by what is left
# where they agree, by a quarter of how far the nearest device is apart and, in 8 bits and less, by
# what is left there. Source: the same tables, the numbers taken from those of all chips but the one
# asked about. In BF16 91 % of 31 tables of vLLM, SGLang and TensorRT-LLM on A100, H100, H200 and
# L40S are inside, at a median width of 0.79 times an answer; in FP8 1.78.
_MULTIPLE, _AGREED_LOG, _APART_SHARE, _NARROW_LOG = 1.66, 0.2, 0.25, 0.24
_WIDE_BITS = 16
_MAX_LAW_ROWS = 500
# What relatives count for with few own points, which correct them, and with how many points half of
# that. Source: 30 of the tables in BF16 under vLLM and TensorRT-LLM, each without its chip, err
# 13.8 % with 20 own points (15.1 without relatives) and 10.2 with 100 (10.7); with 1,000 an eighth
# of the answer is too much for an A100's decode attention, 3.1 % off instead of 2.6.
_FEW_SHARE, _HALF_SHARE_POINTS = 0.5, 100


@dataclass(frozen=True, slots=True)
class Shown:
    """What one relative shows of calls: log(latency / base latency), both on the device asked.

    `moved_log` is its own answer, absent where its points do not cover a call, `law_log` what the
    law that it follows says.
    """

    apart_log: float
    moved_log: FloatColumn
    law_log: FloatColumn

    @property
    def weight(self) -> float:
        """How much it counts among others."""
        return 1.0 / (_LIKE_LOG**2 + self.apart_log**2)


def may_show(device: DeviceSpec, other: DeviceSpec) -> bool:
    """Tell whether kernels of one device are the like of another's."""
    return {device.architecture, other.architecture} <= _ARCHITECTURES


def apart_log(device: DeviceSpec, other: DeviceSpec) -> float:
    """Return how far apart two devices are in the time that fills their cache from memory."""
    mine, others = (it.l2_cache_bytes / it.memory_bandwidth_bytes_per_s for it in (device, other))
    return abs(math.log(mine / others))


def own_share_of(num_points: int) -> float:
    """Return the share of a device's own model of so many points, next to corrected relatives."""
    return 1.0 - _FEW_SHARE * _HALF_SHARE_POINTS / (_HALF_SHARE_POINTS + num_points)


def fit_series_law(series: Series) -> DeviceLaw:
    """Return the law that a series follows on its device."""
    count = min(series.num_points, _MAX_LAW_ROWS)
    rows = np.random.default_rng(0).choice(series.num_points, count, replace=False)
    drawn = series.take(np.sort(rows))
    target = series.key.target
    design = hold_to_exponentials(series.key.spec, target.device, drawn.design)
    return fit_device_law(design, np.log(drawn.latency_us / design.base_us))


def combine(
    typical: LatencyColumns,
    design: Design,
    floor_us: FloatColumn,
    shown: Sequence[Shown],
    dtype: DType,
    basis: str,
) -> Reference:
    """Return the mean of what is typical, of relatives' laws and of what they show of the calls.

    Its voices are what is typical, and each relative's law and what it shows.
    """
    weights = np.array([it.weight for it in shown])
    law_log = np.average([it.law_log for it in shown], axis=0, weights=weights)
    moved_log = np.stack([it.moved_log for it in shown])
    is_shown = np.isfinite(moved_log)
    total = weights @ is_shown
    weighed_log = weights @ np.where(is_shown, moved_log, 0.0)
    shown_log = np.where(total > 0.0, weighed_log / np.where(total > 0.0, total, 1.0), law_log)
    voices = np.stack([np.log(typical.latency_us / design.base_us), law_log, shown_log])
    mean_log = np.average(voices, axis=0, weights=_SHARES)
    spread_log = np.sqrt(np.average((voices - mean_log) ** 2, axis=0, weights=_SHARES))
    apart_log = _APART_SHARE * min(it.apart_log for it in shown)
    narrow_log = _NARROW_LOG if element_bits(dtype) < _WIDE_BITS else 0.0
    fixed_log = math.hypot(_AGREED_LOG, apart_log, narrow_log)
    width_log = _MULTIPLE * np.hypot(fixed_log, spread_log)
    latency_us = np.maximum(design.base_us * np.exp(mean_log), floor_us)
    found = LatencyColumns(
        latency_us=latency_us,
        low_us=np.minimum(np.maximum(latency_us * np.exp(-width_log), floor_us), latency_us),
        high_us=latency_us * np.exp(width_log),
        provenance=np.full(len(latency_us), Provenance.TRANSFERRED.value),
        nearest_us=typical.nearest_us,
        nearest_octaves=typical.nearest_octaves,
        basis=basis,
    )
    own = np.where(is_shown, moved_log, [it.law_log for it in shown])
    every = np.vstack([voices[:1], own, [it.law_log for it in shown]])
    return Reference(found, Places(design.axes, (every - mean_log).T))
