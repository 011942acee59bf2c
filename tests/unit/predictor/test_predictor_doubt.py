"""Further causes of errors widen an interval; a device's memory bounds what nobody measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType, LatencyColumns, Provenance
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.roofline import Target
from foretoken.predictor.transfer.row_band import hold_to_memory

_LOGS = st.floats(0.0, 2.0)


def _estimate(latency_us: float, low: float, high: float, of: Provenance) -> LatencyColumns:
    return LatencyColumns(
        latency_us=np.array([latency_us]),
        low_us=np.array([latency_us * low]),
        high_us=np.array([latency_us * high]),
        provenance=np.array([of.value]),
    )


@given(_LOGS, _LOGS, _LOGS, _LOGS)
def test_squares_of_causes_add_up_on_either_side(
    down: float, up: float, first: float, second: float
) -> None:
    found = _estimate(7.0, np.exp(-down), np.exp(up), Provenance.TRANSFERRED)
    twice = widen(widen(found, first), second)
    assert np.exp(np.sqrt(up**2 + first**2 + second**2)) == pytest.approx(twice.high_us[0] / 7)
    assert np.exp(-np.sqrt(down**2 + first**2 + second**2)) == pytest.approx(twice.low_us[0] / 7)
    assert found.latency_us == twice.latency_us
    np.testing.assert_allclose(widen(found, 0.0).high_us, found.high_us)


def _design(operator: str, num_tokens: int, device: str) -> Design:
    columns = {"num_tokens": np.array([num_tokens]), "hidden": np.array([8192])}
    return build_design(
        find_operator(operator), columns, Target(device=find_device(device), dtype=DType.BF16)
    )


def _held(
    operator: str, num_tokens: int, ratio: float, of: Provenance, device: str = "h100_sxm"
) -> tuple[float, float]:
    """Return the bounds over the base latency, of an estimate so many times that."""
    design = _design(operator, num_tokens, device)
    base_us = float(design.base_us[0])
    found = _estimate(ratio * base_us, 0.1, 10.0, of)
    held = hold_to_memory(find_operator(operator), find_device(device), design, found)
    assert found.latency_us == held.latency_us
    return float(held.low_us[0]) / base_us, float(held.high_us[0]) / base_us


@pytest.mark.parametrize("of", [Provenance.TRANSFERRED, Provenance.ANALYTICAL])
def test_what_memory_carries_bounds_a_kernel_nobody_measured(of: Provenance) -> None:
    assert pytest.approx((0.95, 3.0)) == _held("rms_norm", 2**15, 1.5, of)
    # What lies in the cache may be as fast as it likes.
    assert pytest.approx((0.15, 3.0)) == _held("rms_norm", 2**10, 1.5, of)
    # A device nobody measured on is 1.3 apart at least.
    assert pytest.approx((0.95, 2.9 * 1.3)) == _held("rms_norm", 2**15, 2.9, of)
    assert pytest.approx((1.0 / 1.3, 3.0)) == _held("rms_norm", 2**15, 1.0, of)


@pytest.mark.parametrize(
    ("operator", "num_tokens", "ratio", "of", "device"),
    [
        ("rms_norm", 2**15, 1.5, Provenance.INTERPOLATED, "h100_sxm"),
        # Estimated outside of the band, a launch, no kernel over rows, no GPU.
        ("rms_norm", 2**15, 4.0, Provenance.TRANSFERRED, "h100_sxm"),
        ("rms_norm", 1, 1.5, Provenance.TRANSFERRED, "h100_sxm"),
        ("rms_norm", 2**15, 1.5, Provenance.TRANSFERRED, "cpu"),
    ],
)
def test_other_estimates_keep_their_bounds(
    operator: str, num_tokens: int, ratio: float, of: Provenance, device: str
) -> None:
    expected = (0.1 * ratio, 10.0 * ratio)
    assert pytest.approx(expected) == _held(operator, num_tokens, ratio, of, device)
