"""Devices of the same chip, which differ in memory, power or clock alone.

What was measured on one tells the others better than a law over all devices does: an A100 of 40 GB
runs the kernels of one of 80 GB, and waits longer for its memory.
"""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.hardware.device import DeviceSpec, all_devices, find_device
from foretoken.domain.hardware.topology import TopologySpec, all_topologies
from foretoken.domain.measurements.estimate import DType, LatencyColumns, Provenance
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.roofline import FloatColumn

# Products of one chip differ in what is switched off: the B200 has 148, the GB200 152 SMs.
_SMS_TOLERANCE_RATIO = 0.05
# Data sheets round to two or three digits.
_RATES_TOLERANCE_RATIO = 0.05
# How much further off than on the device measured itself. Source: operators of GPT layers on A100
# of 40 GB, estimated from samples on 80 GB, are 0 to 14 % off, mean 4 %; GEMMs of an H100 estimated
# from a GH200 15 % on average, from an H200 with software two years newer 20 %.
SIBLING_DOUBT_LOG = math.log(1.3)
# The share of another device's measurement in an estimate at its very point. Source: what vLLM's
# products in BF16 take beyond their neighbours goes together by 0.5 on H100 and H200 and by 0.46 on
# B200 and GB200 (35,742 points each); what is left is of the one device, or of the one measurement.
MOVED_SHARE = 0.5


def find_siblings(device: DeviceSpec, dtype: DType) -> tuple[DeviceSpec, ...]:
    """Return the other products of the device's chip in a format, those most like it first."""
    found = [
        other
        for other in all_devices().values()
        if other.name != device.name
        and (other.kind, other.architecture) == (device.kind, device.architecture)
        and abs(other.num_sms / device.num_sms - 1) <= _SMS_TOLERANCE_RATIO
        and _is_as_fast_to_bf16(dtype, device, other)
    ]
    return tuple(sorted(found, key=lambda other: (_distance(device, other), other.name)))


def name_chip(device: DeviceSpec) -> str:
    """Return one name for all products of a device's chip."""
    return min([device.name, *(other.name for other in find_siblings(device, DType.BF16))])


def _is_as_fast_to_bf16(dtype: DType, device: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether tensor cores are alike: a B300 has more FP4 than a B200, less INT8, as much FP8."""
    mine, others = (
        asked.peak_flops(dtype) / asked.peak_flops(DType.BF16) for asked in (device, other)
    )
    return abs(mine / others - 1) <= _RATES_TOLERANCE_RATIO


def find_linked_alike(topology: TopologySpec) -> tuple[TopologySpec, ...]:
    """Return the topologies whose nodes link as many devices of the same chip by the same links.

    Source: microsoft/apex_plus, collectives of eight H100 and of eight H200: gathers, scatters and
    exchanges of 8 MiB to 128 MiB are within 7 % of each other, one outlier aside, all-reduces
    within 19 %.
    """
    device = find_device(topology.device)
    names = [device.name, *(sibling.name for sibling in find_siblings(device, DType.BF16))]
    found = [
        other
        for other in all_topologies().values()
        if other.name != topology.name
        and other.device in names
        and other.devices_per_node == topology.devices_per_node
        and other.intra_node.bandwidth_bytes_per_s == topology.intra_node.bandwidth_bytes_per_s
        and other.links_pairs == topology.links_pairs
    ]
    return tuple(sorted(found, key=lambda other: (names.index(other.device), other.name)))


def move_base(
    estimates: LatencyColumns, measured_base_us: FloatColumn, asked_base_us: FloatColumn
) -> LatencyColumns:
    """Return estimates at one base latency as those at another.

    The difference of the base latencies is added, not their ratio applied: of a kernel that takes
    longer than its base, only the base follows the memory or the clock.
    """
    shift_us = asked_base_us - measured_base_us

    def shifted(times_us: npt.ArrayLike) -> FloatColumn:
        times_us = np.asarray(times_us)
        # A kernel faster than its base, out of a cache, follows the ratio: it must stay positive.
        scaled_us = times_us * asked_base_us / measured_base_us
        return np.where(times_us < measured_base_us, scaled_us, times_us + shift_us)

    return replace(
        estimates,
        latency_us=shifted(estimates.latency_us),
        low_us=shifted(estimates.low_us),
        high_us=shifted(estimates.high_us),
    )


def move_to_sibling(
    estimates: LatencyColumns, measured_base_us: FloatColumn, asked_base_us: FloatColumn
) -> LatencyColumns:
    """Return estimates of one device as those of a sibling, from the base latencies on both."""
    moved = move_base(estimates, measured_base_us, asked_base_us)
    return replace(
        widen(moved, SIBLING_DOUBT_LOG),
        provenance=np.full(len(measured_base_us), Provenance.TRANSFERRED.value),
        basis=f"{estimates.basis}, the same chip, moved by what its data sheets differ in",
    )


def _distance(device: DeviceSpec, other: DeviceSpec) -> float:
    peaks = other.peak_flops(DType.BF16) / device.peak_flops(DType.BF16)
    bandwidths = other.memory_bandwidth_bytes_per_s / device.memory_bandwidth_bytes_per_s
    return abs(math.log(peaks)) + abs(math.log(bandwidths))
