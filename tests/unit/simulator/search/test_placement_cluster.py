"""Pipelines that fill a cluster of several kinds of node."""

import math
from itertools import groupby

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.training_search import NodeGroup, TrainingSpace
from foretoken.simulator.search.placement.cluster import (
    MAX_ORDERS,
    NodeKind,
    count_orders,
    list_kinds,
    list_orders,
    list_pipelines,
    list_subsets,
)


def _kind(num_nodes: int, devices_per_node: int = 8) -> NodeKind:
    return NodeKind(
        device="a40",
        topology="a40_pcie",
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        usd_per_hour=1.0,
    )


@pytest.mark.parametrize("counts", [(3,), (2, 1), (1, 1, 1), (2, 2), (0, 4)])
def test_orders_are_all_there_are(counts: tuple[int, ...]) -> None:
    orders = list_orders(counts)
    expected = math.factorial(sum(counts)) // math.prod(math.factorial(item) for item in counts)
    assert expected == len(set(orders)) == len(orders) == count_orders(counts)
    for order in orders:
        assert counts == tuple(order.count(kind) for kind in range(len(counts)))


def test_of_too_many_orders_those_stay_whose_kinds_are_together() -> None:
    counts = (4, 4)
    assert count_orders(counts) > MAX_ORDERS
    orders = list_orders(counts)
    assert {(0,) * 4 + (1,) * 4, (1,) * 4 + (0,) * 4} == set(orders)
    assert all(len(list(groupby(order))) == 2 for order in orders)


def test_subsets_have_every_number_of_nodes_but_none() -> None:
    kinds = [_kind(2), _kind(1)]
    assert {(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)} == set(list_subsets(kinds, has_subsets=True))
    assert [(2, 1)] == list(list_subsets(kinds, has_subsets=False))


def test_a_pipeline_has_all_devices_of_its_nodes() -> None:
    kinds = [_kind(2), _kind(3, devices_per_node=4)]
    pipelines, _ = list_pipelines(kinds, has_subsets=True, max_stages=28)
    assert pipelines
    for pipeline in pipelines:
        sizes = [
            count * kind.devices_per_node for count, kind in zip(pipeline.nodes, kinds, strict=True)
        ]
        assert sum(sizes) == pipeline.num_devices
        for kind, size in enumerate(sizes):
            assert size == pipeline.stages.count(kind) * pipeline.stage_size


def test_stages_of_two_kinds_share_no_node() -> None:
    """Two stages of half a node each, apart in the pipeline, would need two nodes."""
    pipelines, _ = list_pipelines([_kind(1), _kind(1)], has_subsets=False, max_stages=32)
    halves = {pipeline.stages for pipeline in pipelines if pipeline.stage_size == 4}
    assert {(0, 0, 1, 1), (1, 1, 0, 0)} == halves


def test_pipelines_have_no_more_stages_than_layers() -> None:
    pipelines, _ = list_pipelines([_kind(4)], has_subsets=True, max_stages=6)
    assert max(len(pipeline.stages) for pipeline in pipelines) <= 6


def test_groups_take_the_topology_of_their_size() -> None:
    group = NodeGroup(device="a100_sxm_80", devices_per_node=4)
    (kind,) = list_kinds(TrainingSpace(node_groups=(group,), usd_per_hour={"a100_sxm_80": 2.5}))
    assert kind.devices_per_node == 4
    assert kind.usd_per_hour == 2.5


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ((NodeGroup(device="a40", devices_per_node=5),), "no topology of a40 has 5"),
        ((NodeGroup(device="a40", topology="a40_pcie", devices_per_node=5),), "not 5"),
        ((NodeGroup(device="a40"), NodeGroup(device="a40")), "twice"),
    ],
)
def test_groups_that_nobody_has_are_refused(groups: tuple[NodeGroup, ...], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        list_kinds(TrainingSpace(node_groups=groups))
