"""What operators take on hardware of which a part is better."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, OperatorTable
from foretoken.simulator.search.hardware_change import HARDWARE_CHANGES, HardwareChange

_DEVICE, _TOPOLOGY = "a100_sxm_80", "a100_dgx"


def _product(m: int, n: int = 8192, k: int = 8192) -> OperatorTable:
    return OperatorTable(operator="gemm", dtype=DType.BF16, columns={"m": [m], "n": [n], "k": [k]})


def _ratio(table: OperatorTable, change: HardwareChange) -> float:
    return float(change.time_ratio(table, _DEVICE, _TOPOLOGY)[0])


def test_an_operator_gains_by_the_part_that_binds_it() -> None:
    """One row streams the weights; 8,192 rows multiply."""
    faster_memory, faster_units = (
        HardwareChange(memory_bandwidth=1.5),
        HardwareChange(arithmetic=2.0),
    )
    assert _ratio(_product(1), faster_memory) == pytest.approx(1 / 1.5)
    assert 1.0 == _ratio(_product(1), faster_units)
    assert 1.0 == _ratio(_product(8192), faster_memory)
    assert _ratio(_product(8192), faster_units) == pytest.approx(0.5)


def test_an_operator_gains_until_another_part_binds() -> None:
    """Products whose arithmetic takes a third longer than their bytes gain a quarter at most."""
    device = find_device(_DEVICE)
    # k rows of n columns: 2 m n k FLOP over 2 (m n + m k + n k) bytes; here of m = n = k.
    side = 4 / 3 * 3 * device.peak_flops(DType.BF16) / device.memory_bandwidth_bytes_per_s
    table = _product(round(side), round(side), round(side))
    assert _ratio(table, HardwareChange(arithmetic=2.0)) == pytest.approx(3 / 4, rel=0.01)


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_the_latency_of_links_stays(num_nodes: int) -> None:
    """Bytes go twice as fast: what a small message takes is not of its bytes."""
    small, large = (
        OperatorTable(
            operator="send_recv",
            dtype=DType.BF16,
            columns={"message_bytes": [size], "num_nodes": [num_nodes], "devices_per_node": [1]},
        )
        for size in (1, 10**10)
    )
    change = HardwareChange(links=2.0)
    assert _ratio(small, change) == pytest.approx(1.0, abs=1e-4)
    assert _ratio(large, change) == pytest.approx(0.5, abs=1e-3)
    assert 1.0 == _ratio(large, HardwareChange(memory_bandwidth=1.5, arithmetic=2.0))


def test_capacity_alone_changes_no_time() -> None:
    assert not HARDWARE_CHANGES["memory capacity +50 %"].has_other_times
    with_capacity = HardwareChange(memory_capacity=1.5).change_device(find_device(_DEVICE))
    assert 1.5 * find_device(_DEVICE).memory_bytes == with_capacity.memory_bytes


def test_links_of_both_kinds_change() -> None:
    before = find_topology(_TOPOLOGY)
    after = HardwareChange(links=2.0).change_topology(before)
    for name in ("intra_node", "inter_node"):
        old, new = getattr(before, name), getattr(after, name)
        assert 2 * old.bandwidth_bytes_per_s == new.bandwidth_bytes_per_s
        assert old.latency_us == new.latency_us


@given(
    sides=st.tuples(*[st.integers(1, 2**15)] * 3),
    bandwidth=st.floats(1.0, 4.0),
    arithmetic=st.floats(1.0, 4.0),
)
def test_no_operator_gains_more_than_the_better_part(
    sides: tuple[int, int, int], bandwidth: float, arithmetic: float
) -> None:
    change = HardwareChange(memory_bandwidth=bandwidth, arithmetic=arithmetic)
    ratio = _ratio(_product(*sides), change)
    assert 1 / max(bandwidth, arithmetic) - 1e-9 <= ratio <= 1 / min(bandwidth, arithmetic) + 1e-9
    assert ratio <= 1 + 1e-9


def test_every_row_has_its_own_ratio() -> None:
    table = OperatorTable(
        operator="gemm",
        dtype=DType.BF16,
        columns={"m": np.array([1, 8192]), "n": np.array([8192] * 2), "k": np.array([8192] * 2)},
    )
    found = HardwareChange(arithmetic=2.0).time_ratio(table, _DEVICE, _TOPOLOGY)
    assert [1.0, 0.5] == pytest.approx(found.tolist())
