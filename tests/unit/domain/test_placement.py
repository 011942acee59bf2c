"""Where the ranks of a group sit."""

import pytest

from foretoken.domain.lowering.communication import (
    ExpertMesh,
    RankGroup,
    expert_mesh,
    group_dims,
    neighbour_dims,
    stage_pair_dims,
)
from foretoken.domain.requests.layout import ParallelLayout


@pytest.mark.parametrize(
    ("layout", "axis", "devices_per_node", "expected"),
    [
        (ParallelLayout(tp=8), "tp", 8, (8, 1)),
        (ParallelLayout(tp=8), "tp", 4, (4, 2)),
        (ParallelLayout(tp=6), "tp", 4, (3, 2)),
        (ParallelLayout(tp=4, dp=4), "dp", 8, (2, 2)),
        (ParallelLayout(tp=8, dp=4), "dp", 8, (1, 4)),
        (ParallelLayout(tp=2, dp=2, pp=2), "pp", 8, (2, 1)),
    ],
)
def test_groups_fill_nodes_before_they_span_them(
    layout: ParallelLayout, axis: str, devices_per_node: int, expected: tuple[int, int]
) -> None:
    dims = group_dims(layout, axis, devices_per_node)
    assert expected == (dims["devices_per_node"], dims["num_nodes"])


def test_stages_are_neighbours_on_one_node_only_if_all_fit_it() -> None:
    inside = neighbour_dims(ParallelLayout(tp=2, pp=4), "pp", 8)
    assert {"devices_per_node": 2, "num_nodes": 1} == inside
    across = neighbour_dims(ParallelLayout(tp=4, pp=4), "pp", 8)
    assert {"devices_per_node": 1, "num_nodes": 2} == across


@pytest.mark.parametrize(
    ("first", "second", "num_nodes"), [(0, 1, 1), (1, 2, 2), (2, 3, 1), (3, 0, 2)]
)
def test_two_stages_are_on_one_node_or_not(first: int, second: int, num_nodes: int) -> None:
    """Two stages of four ranks fill a node of eight."""
    dims = stage_pair_dims(ParallelLayout(tp=4, pp=4), first, second, 8)
    assert (2 // num_nodes, num_nodes) == (dims["devices_per_node"], dims["num_nodes"])


@pytest.mark.parametrize(
    ("layout", "expert_tp", "expected"),
    [
        (ParallelLayout(tp=4), 0, ExpertMesh(tp=4, ep=1, dp=1)),
        (ParallelLayout(tp=8, ep=2), 0, ExpertMesh(tp=4, ep=2, dp=1)),
        (ParallelLayout(tp=2, dp=4, ep=4), 0, ExpertMesh(tp=1, ep=4, dp=2)),
        (ParallelLayout(tp=2, cp=2, dp=4, ep=4), 2, ExpertMesh(tp=2, ep=4, dp=2)),
    ],
)
def test_experts_lie_on_a_mesh_of_their_own(
    layout: ParallelLayout, expert_tp: int, expected: ExpertMesh
) -> None:
    mesh = expert_mesh(layout, expert_tp)
    assert expected == mesh
    assert mesh.tp == mesh.expert_group.stride
    assert layout.tp * layout.cp * layout.dp == mesh.tp * mesh.ep * mesh.dp


@pytest.mark.parametrize(
    ("group", "ports", "expected"),
    [
        (RankGroup(axis="dp", degree=4, stride=8), 0, 1),
        (RankGroup(axis="dp", degree=4, stride=8), 8, 1),
        # Eight groups of one device a node take four ports.
        (RankGroup(axis="dp", degree=4, stride=8), 4, 2),
        (RankGroup(axis="dp", degree=4, stride=8), 1, 8),
        # Two groups of four take four ports each, the whole node's group all of them.
        (RankGroup(axis="dp", degree=8, stride=2), 4, 2),
        (RankGroup(axis="dp", degree=16), 4, 1),
        # Inside of a node there are none.
        (RankGroup(axis="tp", degree=8), 1, 1),
    ],
)
def test_groups_of_a_node_share_its_ports(group: RankGroup, ports: int, expected: int) -> None:
    assert expected == group.count_sharing(8, ports)
