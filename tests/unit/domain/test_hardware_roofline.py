"""The least time an operator can take."""

import dataclasses

import numpy as np
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import collective_terms, compute_terms
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator

_A30 = find_device("a30")
_DGX = find_topology("a100_dgx")
_MEGABYTE = 1_000_000


def test_a_large_gemm_is_bound_by_compute_and_a_thin_one_by_memory() -> None:
    gemm = find_operator("gemm")
    large = compute_terms(gemm, {"m": 4096, "n": 4096, "k": 4096}, DType.FP16, Phase.FORWARD, _A30)
    assert pytest.approx(2 * 4096**3 / 165e12 * 1e6) == large.compute_us
    assert pytest.approx(3 * 4096**2 * 2 / 933e9 * 1e6) == large.memory_us
    assert _A30.launch_latency_us == large.floor_us
    thin = compute_terms(gemm, {"m": 1, "n": 4096, "k": 4096}, DType.FP16, Phase.FORWARD, _A30)
    assert large.compute_us > large.memory_us
    assert thin.memory_us > thin.compute_us


def test_the_backward_pass_scales_both_limits() -> None:
    norm, dims = find_operator("rms_norm"), {"num_tokens": 64, "hidden": 4096}
    forward = compute_terms(norm, dims, DType.FP16, Phase.FORWARD, _A30)
    backward = compute_terms(norm, dims, DType.FP16, Phase.BACKWARD, _A30)
    assert 2 * forward.compute_us == backward.compute_us
    assert 2 * forward.memory_us == backward.memory_us


def _all_reduce_us(devices_per_node: int, num_nodes: int, operator: str = "all_reduce") -> float:
    dims = {
        "message_bytes": _MEGABYTE,
        "devices_per_node": devices_per_node,
        "num_nodes": num_nodes,
    }
    terms = collective_terms(find_operator(operator), dims, num_nodes, _DGX)
    return float(terms.memory_us)


def test_a_collective_inside_a_node_takes_its_links() -> None:
    assert pytest.approx(2 * _MEGABYTE * 7 / 8 / 300e9 * 1e6) == _all_reduce_us(8, 1)


def test_between_nodes_the_ports_of_a_group_count_together() -> None:
    assert pytest.approx(_MEGABYTE / 25e9 * 1e6) == _all_reduce_us(1, 2)
    assert pytest.approx(2 * _MEGABYTE * 15 / 16 / (8 * 25e9) * 1e6) == _all_reduce_us(8, 2)


def test_ports_together_are_no_faster_than_the_links_inside() -> None:
    assert pytest.approx(2 * _MEGABYTE * 31 / 32 / 300e9 * 1e6) == _all_reduce_us(16, 2)


def test_an_all_to_all_sends_by_its_own_port_what_is_for_other_nodes() -> None:
    """Of sixteen ranks eight are on the other node and seven on the same."""
    expected = _MEGABYTE * (8 / 16 / 25e9 + 7 / 16 / 300e9) * 1e6
    assert pytest.approx(expected) == _all_reduce_us(8, 2, "all_to_all")
    assert pytest.approx(_MEGABYTE * 3 / 4 / 25e9 * 1e6) == _all_reduce_us(1, 4, "all_to_all")
    assert pytest.approx(_MEGABYTE / 25e9 * 1e6) == _all_reduce_us(1, 2, "send_recv")


def test_devices_take_turns_at_the_ports_of_a_node_with_fewer() -> None:
    """Four ports for eight devices: a ring takes all four, an all-to-all half of one each."""
    few = dataclasses.replace(_DGX, ports_per_node=4)
    dims = {"message_bytes": _MEGABYTE, "devices_per_node": 8, "num_nodes": 2}
    ring = collective_terms(find_operator("all_reduce"), dims, 2, few)
    assert pytest.approx(2 * _MEGABYTE * 15 / 16 / (4 * 25e9) * 1e6) == ring.memory_us
    pairs = collective_terms(find_operator("all_to_all"), dims, 2, few)
    expected = _MEGABYTE * (8 / 16 / 12.5e9 + 7 / 16 / 300e9) * 1e6
    assert pytest.approx(expected) == pairs.memory_us
    alone = collective_terms(find_operator("all_reduce"), {**dims, "devices_per_node": 1}, 2, few)
    assert pytest.approx(_MEGABYTE / 25e9 * 1e6) == alone.memory_us


def test_links_decide_the_floor_of_a_collective() -> None:
    spec = find_operator("send_recv")
    dims = {"message_bytes": 1, "devices_per_node": 1, "num_nodes": 2}
    assert _DGX.intra_node.latency_us == collective_terms(spec, dims, 1, _DGX).floor_us
    assert _DGX.inter_node.latency_us == collective_terms(spec, dims, 2, _DGX).floor_us


def test_columns_give_what_single_calls_give() -> None:
    per_node = [1, 2, 8, 16]
    columns = {
        "message_bytes": np.array([_MEGABYTE] * 4),
        "devices_per_node": np.array(per_node),
        "num_nodes": np.array([2] * 4),
    }
    terms = collective_terms(find_operator("all_reduce"), columns, 2, _DGX)
    assert [_all_reduce_us(count, 2) for count in per_node] == terms.memory_us.tolist()


@pytest.mark.parametrize(("devices", "num_links"), [(2, 1), (4, 3), (8, 7)])
def test_where_links_join_pairs_a_group_has_those_between_its_own(
    devices: int, num_links: int
) -> None:
    """Two of eight MI300X share one link of 64 GB/s of the seven that each has."""
    platform = find_topology("mi300x_platform")
    dims = {"message_bytes": _MEGABYTE, "devices_per_node": devices, "num_nodes": 1}
    terms = collective_terms(find_operator("all_gather"), dims, 1, platform)
    switched = collective_terms(
        find_operator("all_gather"), dims, 1, dataclasses.replace(platform, links_pairs=False)
    )
    assert pytest.approx(switched.memory_us * 7 / num_links) == terms.memory_us
