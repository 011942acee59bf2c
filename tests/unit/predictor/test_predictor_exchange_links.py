"""Exchanges between all ranks on links that only documents tell of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import TopologySpec, find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import build_design
from foretoken.predictor.roofline import Target
from foretoken.predictor.transfer.links import estimate_from_links, has_document

_DGX = find_topology("h100_dgx")
_DEEPEP_BYTES = 8192 * 7168


def _columns(message_bytes: list[int], num_nodes: int) -> dict[str, np.ndarray]:
    return {
        "message_bytes": np.array(message_bytes),
        "devices_per_node": np.full(len(message_bytes), 8),
        "num_nodes": np.full(len(message_bytes), num_nodes),
    }


def _times_us(
    message_bytes: list[int], num_nodes: int, topology: TopologySpec = _DGX
) -> list[float]:
    spec, columns = find_operator("all_to_all"), _columns(message_bytes, num_nodes)
    target = Target(device=find_device(topology.device), dtype=DType.BF16, topology=topology)
    design = build_design(spec, columns, target)
    latency_us = estimate_from_links(spec, columns, topology, design).latency_us
    return [float(time_us) for time_us in latency_us]


@pytest.mark.parametrize(("num_nodes", "measured"), [(2, 85.5e9), (4, 61e9), (8, 50.5e9)])
def test_nodes_exchange_tokens_as_fast_as_deepep_does(num_nodes: int, measured: float) -> None:
    """8,192 tokens of 7,168 bytes to each node, its own too: the mean of dispatch and combine.

    Source: deepseek-ai/DeepEP, README.md (two and four nodes) and docs/legacy.md (eight).
    """
    message_bytes = _DEEPEP_BYTES * num_nodes
    [time_us] = _times_us([message_bytes], num_nodes)
    assert message_bytes / time_us * 1e6 == pytest.approx(measured, rel=0.06)


def test_other_collectives_rest_on_what_is_said_of_them() -> None:
    """A document on exchanges says nothing of a ring; one on rings holds for exchanges too."""
    columns = _columns([2**20], 2)
    ring = replace(_DGX, inter_node=replace(_DGX.inter_node, exchange_ratio=0.0, reached_ratio=0.8))
    for topology, names in ((_DGX, ["all_to_all"]), (ring, ["all_to_all", "all_gather"])):
        told = [
            name
            for name in ("all_to_all", "all_gather")
            if has_document(find_operator(name), columns, topology).all()
        ]
        assert names == told


@given(
    message_bytes=st.integers(1, 2**34),
    more=st.integers(1, 2**30),
    num_nodes=st.integers(2, 512),
)
def test_it_grows_with_message_and_nodes(message_bytes: int, more: int, num_nodes: int) -> None:
    first_us, larger_us = _times_us([message_bytes, message_bytes + more], num_nodes)
    [farther_us] = _times_us([message_bytes], num_nodes + 1)
    assert first_us <= larger_us * (1 + 1e-9)
    assert first_us <= farther_us * (1 + 1e-9)
    sent_bytes = message_bytes * (num_nodes - 1) / num_nodes
    assert sent_bytes / 50e9 * 1e6 < first_us
