"""What the collective operators share: their dimensions, features and sweeps.

A group is (devices per node, nodes): two devices of one node are (2, 1), one on each of two nodes
(1, 2). The slowest link it crosses decides its time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.operator import Dim, Dims, OperatorSpec
from foretoken.domain.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveWork:
    """What a collective's message means, and how it moves.

    `moved_bytes(message_bytes, num_ranks)` are the bytes a rank sends. With `shares_node_links` the
    network ports of a group's devices on one node work together.
    """

    message_meaning: str
    moved_bytes: Callable[[Quantity, Quantity], Quantity]
    sweep: Callable[[bool], Iterator[Mapping[str, int]]]
    shares_node_links: bool = False


def collective_operator(name: str, summary: str, work: CollectiveWork) -> OperatorSpec:
    """Return an operator that moves a message between the ranks of a group."""
    return OperatorSpec(
        name=name,
        summary=summary,
        group="communication",
        dims=(
            Dim("message_bytes", work.message_meaning),
            Dim("devices_per_node", "ranks of the group on one node"),
            Dim("num_nodes", "nodes the group spans"),
        ),
        flops=lambda d, _: 0 * d["message_bytes"],
        moved_bytes=lambda d, _: work.moved_bytes(d["message_bytes"], _num_ranks(d)),
        features={
            "num_ranks": lambda d, _: _num_ranks(d),
            "bytes_per_rank": lambda d, _: d["message_bytes"] / _num_ranks(d),
        },
        sweep=work.sweep,
        is_collective=True,
        shares_node_links=work.shares_node_links,
    )


def all_but_own(message_bytes: Quantity, num_ranks: Quantity) -> Quantity:
    """Return the bytes of a message less a rank's own share of it."""
    return message_bytes * (num_ranks - 1) / num_ranks


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


def _num_ranks(d: Dims) -> Quantity:
    return d["devices_per_node"] * d["num_nodes"]
