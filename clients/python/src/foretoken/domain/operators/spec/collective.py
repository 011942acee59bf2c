"""What the collective operators share: their dimensions, features, sweeps and bandwidths.

A group is (devices per node, nodes): two devices of one node are (2, 1), one on each of two nodes
(1, 2). The slowest link it crosses decides its time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec, find_operator
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import US_PER_S, Quantity

# Groups worth timing as (devices per node, nodes), as far as they are present.
_GROUPS = ((2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (1, 4), (8, 4))
_PAIRS = ((2, 1), (1, 2))
_PAIR = 2
_QUICK_GROUPS = ((2, 1),)
_SIZES = powers_of_two(2**10, 2**30)
_QUICK_SIZES = powers_of_two(2**10, 2**25)[::3]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """How fast a collective was: its message over its time, and what a rank sent over its time.

    The second one can be held against the bandwidth of the links, whatever the number of ranks.
    Source: nccl-tests, doc/PERFORMANCE.md (algorithm bandwidth, bus bandwidth).
    """

    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


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


def bandwidth_of(operator: str, dims: Mapping[str, int], latency_us: float) -> Bandwidth:
    """Return the bandwidths of a collective that took `latency_us`.

    Raises:
        UnknownOperatorError: there is no such operator.

    """
    seconds = latency_us / US_PER_S
    moved_bytes = float(find_operator(operator).moved_bytes(dims, 1.0))
    return Bandwidth(
        algorithm_bytes_per_s=dims["message_bytes"] / seconds,
        bus_bytes_per_s=moved_bytes / seconds,
    )


def variant_of_group(operator: str, num_ranks: int) -> str:
    """Return the variant of a collective of so many ranks: a transfer between many is a ring.

    Every rank then sends to the next one and receives from the one before, at the same time.
    """
    return "pattern=ring" if operator == "send_recv" and num_ranks > _PAIR else ""


def all_but_own(message_bytes: Quantity, num_ranks: Quantity) -> Quantity:
    """Return the bytes of a message less a rank's own share of it."""
    return message_bytes * (num_ranks - 1) / num_ranks


def sweep_groups(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield message sizes for groups on one node and over several."""
    yield from _sweep_sizes(quick, _QUICK_GROUPS if quick else _GROUPS)


def sweep_pairs(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield message sizes for a pair of devices on one node, and on two."""
    yield from _sweep_sizes(quick, _QUICK_GROUPS if quick else _PAIRS)


def _sweep_sizes(quick: bool, groups: tuple[tuple[int, int], ...]) -> Iterator[Mapping[str, int]]:
    for devices_per_node, num_nodes in groups:
        for message_bytes in pick(quick, _QUICK_SIZES, _SIZES):
            yield {
                "message_bytes": message_bytes,
                "devices_per_node": devices_per_node,
                "num_nodes": num_nodes,
            }


def _num_ranks(d: Dims) -> Quantity:
    return d["devices_per_node"] * d["num_nodes"]
