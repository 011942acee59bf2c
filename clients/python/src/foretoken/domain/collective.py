"""What the collective operators share: their dimensions, features and sweeps.

A group is (devices per node, nodes): two devices of one node are (2, 1), one on each of two nodes
(1, 2). The slowest link it crosses decides its time.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operator import Dim, FeatureFormula
from foretoken.domain.sweep import pick, powers_of_two


def collective_dims(message_meaning: str) -> tuple[Dim, ...]:
    """Return the dimensions of a collective whose message means `message_meaning`."""
    return (
        Dim("message_bytes", message_meaning),
        Dim("devices_per_node", "ranks of the group on one node"),
        Dim("num_nodes", "nodes the group spans"),
    )


def collective_features() -> dict[str, FeatureFormula]:
    """Return the features that explain a collective's distance from its link bandwidth."""
    return {
        "num_ranks": lambda d, _: d["devices_per_node"] * d["num_nodes"],
        "bytes_per_rank": lambda d, _: (
            d["message_bytes"] / (d["devices_per_node"] * d["num_nodes"])
        ),
    }


def sweep_groups(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield message sizes for groups of 2, 4 and 8 devices on one node."""
    for devices_per_node in pick(quick, (2,), (2, 4, 8)):
        yield from _sweep_sizes(quick, devices_per_node)


def sweep_pairs(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield message sizes for a pair of devices on one node."""
    yield from _sweep_sizes(quick, 2)


def _sweep_sizes(quick: bool, devices_per_node: int) -> Iterator[Mapping[str, int]]:
    for message_bytes in pick(quick, powers_of_two(2**10, 2**25)[::3], powers_of_two(2**10, 2**30)):
        yield {
            "message_bytes": message_bytes,
            "devices_per_node": devices_per_node,
            "num_nodes": 1,
        }
