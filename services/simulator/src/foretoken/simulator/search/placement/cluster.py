"""The nodes of a mixed cluster, and the pipelines that fill them.

A stage has as many devices as any other, all of one kind. A pipeline takes all the nodes of its
subset of the cluster. Stages of a kind are alike, so two placements differ in the order of kinds
along the pipeline; where there are more of these orders than `MAX_ORDERS`, those are tried that
keep the stages of a kind together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, permutations, product
from math import comb

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import TopologySpec, all_topologies, find_topology
from foretoken.domain.requests.training_search import NodeGroup, TrainingSpace

# Orders of kinds along a pipeline that are all tried.
MAX_ORDERS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """Equal nodes: names of device and topology, how many, and what an hour of a device costs."""

    device: str
    topology: str
    devices_per_node: int
    num_nodes: int
    usd_per_hour: float

    @classmethod
    def of_group(cls, group: NodeGroup, space: TrainingSpace) -> "NodeKind":
        """Return the nodes of a group.

        Raises:
            UnknownDeviceError, UnknownTopologyError: no such name.
            InvalidRequestError: no topology has such nodes.

        """
        device = find_device(group.device).name
        links = _find_links(group, device)
        return cls(
            device=device,
            topology=links.name,
            devices_per_node=links.devices_per_node,
            num_nodes=group.num_nodes,
            usd_per_hour=group.usd_per_hour or space.usd_per_hour.get(device, 0.0),
        )


def _find_links(group: NodeGroup, device: str) -> TopologySpec:
    """Return the topology of a group: the one it names, or the first of device and size."""
    wanted = group.devices_per_node
    if group.topology:
        links = find_topology(group.topology)
        if wanted in (0, links.devices_per_node):
            return links
        problem = f"{links.name} has {links.devices_per_node} devices per node, not {wanted}"
        raise InvalidRequestError.of_field("node_groups", problem)
    known = [links for links in all_topologies().values() if links.device == device]
    for links in known:
        if wanted in (0, links.devices_per_node):
            return links
    sizes = ", ".join(f"{links.name} ({links.devices_per_node})" for links in known) or "none"
    raise InvalidRequestError.of_field(
        "node_groups",
        f"no topology of {device} has {wanted or 'any'} devices per node; there are: {sizes}",
    )


def list_kinds(space: TrainingSpace) -> tuple[NodeKind, ...]:
    """Return the kinds of nodes of a cluster.

    Raises:
        InvalidRequestError: a kind is named twice, or as `NodeKind.of_group`.

    """
    kinds = tuple(NodeKind.of_group(group, space) for group in space.node_groups)
    named = [(kind.device, kind.topology) for kind in kinds]
    twice = sorted(
        {f"{name} on {links}" for name, links in named if named.count((name, links)) > 1}
    )
    if twice:
        problem = f"{', '.join(twice)} is there twice: add up the nodes"
        raise InvalidRequestError.of_field("node_groups", problem)
    return kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages of `stage_size` devices: `stages` has the kind of each, `nodes` how many of a kind."""

    nodes: tuple[int, ...]
    stage_size: int
    stages: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return self.stage_size * len(self.stages)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Neighbouring stages of a kind: the kind, and how many."""
        return tuple((kind, len(list(same))) for kind, same in groupby(self.stages))


def list_pipelines(
    kinds: Sequence[NodeKind], *, has_subsets: bool, max_stages: int
) -> tuple[list[Pipeline], int]:
    """Return the pipelines that fill the cluster or a subset of it, and how many orders are left.

    The second tells how many placements `MAX_ORDERS` leaves out.
    """
    found, left = [], 0
    for nodes in list_subsets(kinds, has_subsets=has_subsets):
        sizes = [count * kind.devices_per_node for count, kind in zip(nodes, kinds, strict=True)]
        for stage_size in _common_divisors([size for size in sizes if size]):
            counts = tuple(size // stage_size for size in sizes)
            if sum(counts) > max_stages:
                continue
            num_orders = count_orders(counts)
            orders = list_orders(counts)
            left += max(0, num_orders - len(orders))
            pipelines = [
                Pipeline(nodes=nodes, stage_size=stage_size, stages=order) for order in orders
            ]
            found += [pipeline for pipeline in pipelines if _has_room(pipeline, kinds)]
    return found, left


def list_subsets(kinds: Sequence[NodeKind], *, has_subsets: bool) -> Iterator[tuple[int, ...]]:
    """Yield how many nodes of each kind are used: all, or every number of each."""
    if not has_subsets:
        yield tuple(kind.num_nodes for kind in kinds)
        return
    for nodes in product(*(range(kind.num_nodes + 1) for kind in kinds)):
        if any(nodes):
            yield nodes


def count_orders(counts: Sequence[int]) -> int:
    """Return in how many orders so many stages of each kind can stand."""
    found, total = 1, 0
    for count in counts:
        total += count
        found *= comb(total, count)
    return found


@cache
def list_orders(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of kinds that are tried for so many stages of each."""
    if count_orders(counts) <= MAX_ORDERS:
        return tuple(_orders(counts))
    used = [kind for kind, count in enumerate(counts) if count]
    return tuple(
        tuple(kind for kind in order for _ in range(counts[kind])) for order in permutations(used)
    )


def _orders(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not any(counts):
        yield ()
    for kind, count in enumerate(counts):
        if count:
            rest = (*counts[:kind], count - 1, *counts[kind + 1 :])
            for order in _orders(rest):
                yield (kind, *order)


def _common_divisors(sizes: Sequence[int]) -> list[int]:
    return [size for size in range(1, min(sizes) + 1) if not any(item % size for item in sizes)]


def _has_room(pipeline: Pipeline, kinds: Sequence[NodeKind]) -> bool:
    """Return whether the nodes suffice, of which stages of two kinds share none."""
    needed = [0] * len(kinds)
    for kind, count in pipeline.runs:
        needed[kind] += -(-count * pipeline.stage_size // kinds[kind].devices_per_node)
    return all(count <= there for count, there in zip(needed, pipeline.nodes, strict=True))
