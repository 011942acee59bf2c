"""How many replicas: as many as fit, or as many as a rate needs."""

import numpy as np

from foretoken.simulator.grid import Floats, Ints


def count_replicas(rate_rps: Floats, devices: int, max_devices: int, target_rps: float) -> Ints:
    """Return the fewest replicas of a rate each that carry the target; without one, all that fit.

    A replica that carries nothing is one replica.
    """
    if target_rps == 0.0:
        return np.full(len(rate_rps), max(max_devices // devices, 1), dtype=np.int64)
    needed = np.ceil(target_rps / np.maximum(rate_rps, 1e-12) - 1e-9)
    return np.where(rate_rps > 0.0, np.clip(needed, 1, 2**31), 1).astype(np.int64)


def pair_replicas(
    prefill_rps: Floats,
    decode_rps: Floats,
    devices: tuple[Ints, Ints],
    max_devices: int,
    *,
    counts_idle: bool,
) -> tuple[Ints, Ints]:
    """Return how many prefill and decode replicas match, entry by entry.

    The pair that carries most for each device, and of those the largest; where idle devices count
    the pair that carries most, and of those the smallest. Where not even one of each fits, one of
    each.
    """
    prefill_devices, decode_devices = devices
    best = np.zeros(len(prefill_rps))
    second = np.zeros(len(prefill_rps))
    num_prefill = np.ones(len(prefill_rps), dtype=np.int64)
    num_decode = np.ones(len(prefill_rps), dtype=np.int64)
    for num in range(1, max_devices):
        left = (max_devices - num * prefill_devices) // decode_devices
        if (left < 1).all():
            break
        ideal = num * prefill_rps / np.maximum(decode_rps, 1e-12)
        for rounded in (np.floor(ideal), np.ceil(ideal)):
            others = np.clip(rounded, 1, np.maximum(left, 1)).astype(np.int64)
            carried = np.minimum(num * prefill_rps, others * decode_rps)
            each = carried / (num * prefill_devices + others * decode_devices)
            value, other = (carried, each) if counts_idle else (each, carried)
            is_better = value > best * (1 + 1e-9)
            is_equal = (value >= best * (1 - 1e-9)) & (other > second)
            chosen = (left >= 1) & (is_better | is_equal)
            best = np.where(chosen, value, best)
            second = np.where(chosen, other, second)
            num_prefill = np.where(chosen, num, num_prefill)
            num_decode = np.where(chosen, others, num_decode)
    return num_prefill, num_decode
