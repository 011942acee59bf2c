"""What one prefill more takes, measured or estimated from the part of the device that it fills."""

import numpy as np
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.measurements.estimate import DType, LatencyColumns, Provenance
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.simulator.cost.attention_batching import each_more


def _node(new_tokens: int, context: int) -> OperatorNode:
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return OperatorNode(
        role="attention",
        group="attention",
        section=Section.LAYER,
        operator="attention_prefill",
        dims={**prefill_dims(1, new_tokens, context), **heads},
        dtype=DType.BF16,
    )


def _answer(time_us: float, provenance: Provenance) -> LatencyColumns:
    times_us = np.array([time_us])
    return LatencyColumns(
        latency_us=times_us,
        low_us=0.5 * times_us,
        high_us=2 * times_us,
        provenance=np.array([provenance.value]),
    )


def _more_us(
    node: OperatorNode, times_us: tuple[float, float], is_measured: bool, device: str
) -> float:
    one_us, batched_us = times_us
    provenance = Provenance.INTERPOLATED if is_measured else Provenance.EXTRAPOLATED
    one, batched = _answer(one_us, Provenance.MEASURED), _answer(batched_us, provenance)
    more = each_more(node, one, batched, find_device(device))
    assert more.low_us == pytest.approx(0.5 * more.latency_us)
    assert more.high_us == pytest.approx(2 * more.latency_us)
    return float(more.latency_us[0])


@pytest.mark.parametrize(("batched_us", "expected"), [(110.0, 10.0), (30.0, 0.0), (900.0, 40.0)])
def test_a_measured_batch_says_what_one_more_takes(batched_us: float, expected: float) -> None:
    """Never less than nothing, never more than alone."""
    assert _more_us(_node(16, 1024), (40.0, batched_us), True, "rtx_4090") == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    ("new_tokens", "device", "filled"),
    [
        # A block a head on 128 multiprocessors, then four of them, then more than fit.
        (16, "rtx_4090", 32 / 128),
        (64, "rtx_4090", 32 / 128),
        (256, "rtx_4090", 1.0),
        (512, "rtx_4090", 1.0),
        (16, "rtx_pro_6000", 32 / 188),
        # The four query heads of a key head are rows of one block.
        (16, "h100_sxm", 8 / 132),
        (33, "h100_sxm", 16 / 132),
    ],
)
def test_else_it_takes_the_part_of_the_device_that_it_fills(
    new_tokens: int, device: str, filled: float
) -> None:
    times_us = (40.0, 4000.0)
    more_us = _more_us(_node(new_tokens, 1024), times_us, False, device)
    assert more_us == pytest.approx(40.0 * filled)


def test_it_takes_no_less_than_its_bytes() -> None:
    node, device = _node(1, 100_000), find_device("h100_sxm")
    kv_bytes = 100_001 * 2 * 8 * 128 * 2
    at_least_us = 1e6 * kv_bytes / device.memory_bandwidth_bytes_per_s
    more_us = _more_us(node, (1.1 * at_least_us, 0.0), False, "h100_sxm")
    assert more_us == pytest.approx(at_least_us, rel=0.01)
