"""All-reduces between nodes whose links only documents tell of: NCCL's algorithms and protocols."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import Link, TopologySpec, find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import build_design
from foretoken.predictor.roofline import Target
from foretoken.predictor.transfer.links import estimate_from_links

_HDR = find_topology("a100_hdr_4x")
_ROCE = find_topology("a100_roce_4x")


def _times_us(
    topology: TopologySpec, message_bytes: list[int], num_nodes: int, devices_per_node: int = 8
) -> list[float]:
    columns = {
        "message_bytes": np.array(message_bytes),
        "devices_per_node": np.full(len(message_bytes), devices_per_node),
        "num_nodes": np.full(len(message_bytes), num_nodes),
    }
    spec = find_operator("all_reduce")
    target = Target(device=find_device(topology.device), dtype=DType.BF16, topology=topology)
    design = build_design(spec, columns, target)
    latency_us = estimate_from_links(spec, columns, topology, design).latency_us
    return [float(time_us) for time_us in latency_us]


def _ring_us(message_bytes: int, num_ranks: int, bytes_per_s: float) -> float:
    return 2 * (num_ranks - 1) / num_ranks * message_bytes / bytes_per_s * 1e6


def test_a_few_bytes_over_32_nodes_take_what_was_measured() -> None:
    """8 to 128 bytes over 32 nodes of 8 A100, four HDR ports each: 62.4 to 71.0 us.

    Source: NVIDIA/nccl issue 652 on GitHub.
    """
    for time_us in _times_us(_HDR, [8, 16, 32, 64, 128], 32):
        assert time_us == pytest.approx(66.7, rel=0.08)


def test_256_v100_sum_large_messages_as_measured() -> None:
    """16 DGX-2 with eight 100 Gb/s ports, 32 MB to 2 GB; the last row tells the bandwidth.

    Source: NVIDIA/nccl-tests issue 78 on GitHub, out of place; from 1 to 2 GB time grows by 24.4 ms
    a GB, 87.7 GB/s.
    """
    measured_us = [1464.2, 2659.1, 4263.8, 7946.8, 16129, 29896, 54309]
    dgx2 = replace(
        _HDR,
        name="dgx2",
        device="v100_pcie_16",
        devices_per_node=16,
        ports_per_node=8,
        inter_node=replace(_HDR.inter_node, bandwidth_bytes_per_s=12.5e9, reached_ratio=0.877),
    )
    told_us = _times_us(dgx2, [2**25 << shift for shift in range(7)], 16, 16)
    errors = np.abs(np.array(told_us) / measured_us - 1)
    assert errors.mean() < 0.14
    assert errors[-1] < 0.04


def test_the_hops_of_a_ring_count_nearly_twice_where_parts_fill_the_buffers() -> None:
    """1 GiB on 16 nodes of 8: 224 hops over NVLink of 3.4 us and 30 over the network of 9.6."""
    expected_us = 8.4 + 1.9 * (224 * 3.4 + 30 * 9.6) + _ring_us(2**30, 128, 4 * 25e9 * 0.86)
    [actual_us] = _times_us(_HDR, [2**30], 16)
    assert expected_us == pytest.approx(actual_us)


def test_over_a_thousand_ranks_a_tree_is_faster_and_reaches_less() -> None:
    """1 GiB on 128 nodes of 8: up and down 7 ranks and 7 levels of 28 us, at 92 % of the links."""
    expected_us = 2 * (7 + 7) * 28 + 2 * 2**30 / (0.92 * 4 * 12.5e9 * 0.75) * 1e6
    [actual_us] = _times_us(_ROCE, [2**30], 128)
    assert expected_us == pytest.approx(actual_us)


def test_a_port_carries_no_more_in_a_tree_than_a_channel_does() -> None:
    """Four ports of 21.5 GB/s reached, 17.8 of them in a tree over more than two nodes."""
    expected_us = 2 * (7 + 7) * 28 + 2 * 2**30 / (4 * 17.8e9) * 1e6
    [actual_us] = _times_us(_HDR, [2**30], 128)
    assert expected_us == pytest.approx(actual_us)


def test_inside_a_node_the_message_passes_every_rank_twice() -> None:
    """Eight ranks on links of 100 GB/s, 80 reached, that start in 2 us and pass on in 3."""
    link = Link(bandwidth_bytes_per_s=100e9, latency_us=2.0, reached_ratio=0.8, hop_latency_us=3.0)
    [actual_us] = _times_us(replace(_HDR, intra_node=link), [2**20], 1)
    assert 2 + 2 * 7 * 3 + _ring_us(2**20, 8, 80e9) == pytest.approx(actual_us)


@given(
    message_bytes=st.integers(1, 2**34),
    more=st.integers(1, 2**30),
    num_nodes=st.integers(2, 512),
    devices_per_node=st.sampled_from([1, 2, 4, 8]),
)
def test_it_grows_with_message_and_nodes_and_is_never_faster_than_the_links(
    message_bytes: int, more: int, num_nodes: int, devices_per_node: int
) -> None:
    """Whichever algorithm is the fastest."""
    first_us, larger_us = _times_us(
        _HDR, [message_bytes, message_bytes + more], num_nodes, devices_per_node
    )
    [farther_us] = _times_us(_HDR, [message_bytes], num_nodes + 1, devices_per_node)
    assert first_us <= larger_us * (1 + 1e-9)
    assert first_us <= farther_us * (1 + 1e-9)
    reached = min(devices_per_node, 4) * 25e9 * 0.86
    assert _ring_us(message_bytes, devices_per_node * num_nodes, reached) < first_us
