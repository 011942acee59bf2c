"""Where the ranks of a group sit."""

import pytest

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.placement import group_dims, neighbour_dims


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
