"""What power slows that runs for long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import DeviceSpec, all_devices, find_device
from foretoken.domain.hardware.roofline import RooflineTerms
from foretoken.domain.hardware.sustained import burst_ratio, slowed_ratio
from foretoken.domain.measurements.estimate import DType

_DEVICES = sorted(all_devices())


def _slowed(device: DeviceSpec, utilization: float, limit_w: float = 0.0) -> float:
    """Return the slowdown of a product that reaches a share of the peak and moves nothing."""
    terms = RooflineTerms(utilization * 1_000.0, 0.0, 0.0)
    return float(slowed_ratio(device, DType.BF16, terms, 1_000.0, limit_w))


@pytest.mark.parametrize(
    ("reached", "measured"), [(0.35, 1.02), (0.55, 1.09), (0.65, 1.14), (0.75, 1.22), (0.85, 1.26)]
)
def test_an_h200_slows_as_measured(reached: float, measured: float) -> None:
    """GEMMs in BF16 of 1,024 rows and more, vLLM 0.22.0 for a second over 0.24.0 in bursts.

    Medians by the share of the peak, over those of small calls; AIConfigurator's tables.
    """
    device = find_device("h200_sxm")
    terms = RooflineTerms(reached * 1_000.0, 250.0, 0.0)
    told = float(slowed_ratio(device, DType.BF16, terms, 1_000.0))
    assert pytest.approx(measured, rel=0.05) == told


def test_products_of_a_chip_slow_by_their_own_limits() -> None:
    """An H100 of 350 W slows sooner than one of 700; an H20 of a sixth of its peak never does."""
    h100, pcie, h20 = (find_device(name) for name in ("h100_sxm", "h100_pcie", "h20"))
    assert _slowed(find_device("h200_sxm"), 0.8) == _slowed(h100, 0.8)
    assert 1.0 < _slowed(h100, 0.8) < _slowed(pcie, 0.8)
    assert 1.0 == _slowed(h20, 0.95)


def test_a_lower_limit_slows_more_and_a_higher_one_not_less() -> None:
    device = find_device("h100_sxm")
    told = [_slowed(device, 0.7, limit_w) for limit_w in (0.0, 900.0, 700.0, 500.0, 300.0)]
    assert told[0] == told[1] == told[2] < told[3] < told[4]


def test_where_nothing_is_known_a_device_keeps_its_peak_with_the_power_it_is_sold_with() -> None:
    device = find_device("a100_sxm_80")
    assert 1.0 == _slowed(device, 0.95)
    assert 1.0 < _slowed(device, 0.95, 250.0) < 1.3


@given(
    name=st.sampled_from(_DEVICES),
    dtype=st.sampled_from([DType.BF16, DType.FP16, DType.FP8]),
    compute=st.floats(0.001, 1.0),
    memory=st.floats(0.0, 1.0),
    latency_us=st.floats(1.0, 1e6),
)
def test_what_was_timed_for_long_is_brought_back_to_a_burst(
    name: str, dtype: DType, compute: float, memory: float, latency_us: float
) -> None:
    device = find_device(name)
    terms = RooflineTerms(compute * latency_us, memory * latency_us, 0.0)
    slower = float(slowed_ratio(device, dtype, terms, latency_us))
    assert slower >= 1.0
    back = float(burst_ratio(device, dtype, terms, slower * latency_us))
    assert pytest.approx(slower) == back
