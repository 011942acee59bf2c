"""Who sends how much to whom in a step: the collectives that are timed, put on the devices.

Collectives go round a ring in the order of the ranks, an all-to-all from each rank to every other,
a transfer from a rank to its peer. What a rank sends is what its operator says it moves. Devices
are numbered as in `lowering/placement.py`. Many devices are put together to cells, whole nodes
where they can be.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.lowering.communication import RankGroup, axis_group, expert_mesh
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrafficColumns
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Ints
from foretoken.simulator.steps.chunk_placement import ChunkPlaces
from foretoken.simulator.steps.pipelines.schedule import RankOrder
from foretoken.simulator.steps.stage_operators import ChunkOperators, StepOperators
from foretoken.simulator.training.accounting import pass_nodes

# A picture shows no more cells on a side.
MAX_CELLS = 128
_EXCHANGE = "all_to_all"
_TIED = "embedding_gradient_all_reduce"


def measure_traffic(
    operators: StepOperators, orders: Sequence[RankOrder], scenario: TrainingScenario
) -> TrafficColumns:
    """Return what devices send each other in a step that updates its parameters."""
    matrix = _Matrix(
        num_devices=scenario.layout.num_devices,
        cell=cell_size(scenario.layout.num_devices, operators.chunks[0].rank.devices_per_node),
    )
    step = _Step(operators, ChunkPlaces.of_orders(orders), scenario, matrix)
    for rank, order in enumerate(orders):
        counts: Counter[tuple[str, int]] = Counter()
        counts.update((item.kind, item.chunk) for slot in order for item in slot)
        step.add_rank(rank, counts)
    return matrix.columns()


def cell_size(num_devices: int, devices_per_node: int) -> int:
    """Return how many devices are put together so that there are at most `MAX_CELLS` cells."""
    size = int(ceil_divide(num_devices, MAX_CELLS))
    if size == 1:
        return 1
    return int(ceil_divide(size, devices_per_node)) * devices_per_node


@dataclass(slots=True)
class _Matrix:
    """Bytes from cell to cell, by axis."""

    num_devices: int
    cell: int
    by_axis: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def add(self, axis: str, sources: Ints, targets: Ints, num_bytes: float) -> None:
        """Add what each of the sources sends to its target."""
        side = int(ceil_divide(self.num_devices, self.cell))
        place = sources // self.cell * side + targets // self.cell
        found = self.by_axis.setdefault(axis, np.zeros(side * side))
        found += np.bincount(place, minlength=side * side) * num_bytes

    def columns(self) -> TrafficColumns:
        """Return the cells that anything is sent between."""
        side = int(ceil_divide(self.num_devices, self.cell))
        axes: list[str] = []
        places: list[Ints] = []
        sums: list[NDArray[np.float64]] = []
        for axis, found in self.by_axis.items():
            (used,) = np.nonzero(found)
            axes += [axis] * len(used)
            places.append(used)
            sums.append(found[used])
        place = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
        return TrafficColumns(
            axis=tuple(axes),
            source=place // side * self.cell,
            target=place % side * self.cell,
            num_devices=np.full(len(place), self.cell),
            bytes=np.concatenate(sums) if sums else np.zeros(0),
        )


# What is sent alike: axis, operator, distance and number of the ranks of a group.
_Kind = tuple[str, str, int, int]


class _Step:
    """Puts the collectives of a step on the devices."""

    def __init__(
        self,
        operators: StepOperators,
        places: ChunkPlaces,
        scenario: TrainingScenario,
        matrix: _Matrix,
    ) -> None:
        layout = scenario.layout
        self._operators, self._places, self._scenario = operators, places, scenario
        self._matrix = matrix
        self._stage_size = layout.tp * layout.cp * layout.dp
        self._mesh = expert_mesh(layout, scenario.expert_tp)

    def add_rank(self, rank: int, counts: Counter[tuple[str, int]]) -> None:
        """Add what the devices of one rank of the pipeline send."""
        totals: defaultdict[_Kind, float] = defaultdict(float)
        for (kind, index), count in counts.items():
            chunk = self._operators.chunks[index]
            for node in _collectives(pass_nodes(chunk, kind).nodes):
                totals[self._kind(node, chunk)] += _sent_bytes(node) * count
        for index in self._operators.chunks_of_rank[rank]:
            chunk = self._operators.chunks[index]
            states = chunk.states
            for node in _collectives(chain(states.reduction, states.gather)):
                if node.axis == "pp":
                    self._add_pair(node, rank, index)
                else:
                    totals[self._kind(node, chunk)] += _sent_bytes(node)
            self._add_transfers(chunk, index, rank, counts["forward", index])
        for kind_of_group, num_bytes in totals.items():
            self._add_group(kind_of_group, rank, num_bytes)
        for node in _collectives(self._operators.checks[rank]):
            self._add_agreement(node, rank)

    def _kind(self, node: OperatorNode, chunk: ChunkOperators) -> _Kind:
        group = self._group(node, chunk)
        return node.axis, node.operator, group.stride, group.degree

    def _group(self, node: OperatorNode, chunk: ChunkOperators) -> RankGroup:
        """Return the group of a node, all of whose ranks have the same stage."""
        degree = int(node.dims["devices_per_node"] * node.dims["num_nodes"])
        if node.axis == "tp":
            # Weights of `isp` are split over neighbours too, beyond tp.
            return RankGroup(axis="tp", degree=degree)
        if node.axis == "cp":
            everyone = axis_group(self._scenario.layout, "cp")
            if node.operator == _EXCHANGE:
                return replace(everyone, degree=degree)
            # Keys and values go around between the ranks that exchange heads.
            return everyone.over(self._num_exchanging(chunk))
        if node.axis == "ep":
            is_exchange = node.operator == _EXCHANGE
            return self._mesh.expert_group if is_exchange else self._mesh.tensor_group
        holders = next(item for item in chunk.states.groups if node.role.startswith(item.name))
        if node.operator != "all_reduce":
            return holders.ranks.of_shards
        everyone = holders.ranks.everyone
        return everyone if degree == everyone.degree else holders.ranks.of_replicas

    def _num_exchanging(self, chunk: ChunkOperators) -> int:
        """Return how many ranks of cp exchange heads."""
        exchanges = (n for n in chunk.forward if n.axis == "cp" and n.operator == _EXCHANGE)
        dims = next((node.dims for node in exchanges), {"devices_per_node": 1, "num_nodes": 1})
        return int(dims["devices_per_node"] * dims["num_nodes"])

    def _devices(self, rank: int) -> Ints:
        return np.arange(self._stage_size, dtype=np.int64) + rank * self._stage_size

    def _add_group(self, kind: _Kind, rank: int, num_bytes: float) -> None:
        axis, operator, stride, degree = kind
        devices = self._devices(rank)
        index = (devices - devices[0]) // stride % degree
        # To each of the others, or all of it to the next.
        steps = range(1, degree) if operator == _EXCHANGE else (1,)
        for step in steps if degree > 1 else ():
            targets = devices + ((index + step) % degree - index) * stride
            self._matrix.add(axis, devices, targets, num_bytes / len(steps))

    def _add_pair(self, node: OperatorNode, rank: int, chunk: int) -> None:
        """Add a sum over two ranks of the pipeline: those of a tied embedding, or of a chunk."""
        first, *others = self._places.holders(chunk)
        last = others[-1] if others else first
        if node.role == _TIED:
            ends = (self._places.holders(end)[0] for end in (0, len(self._operators.chunks) - 1))
            first, last = ends
        peer = last if rank == first else first
        self._send(rank, peer, _sent_bytes(node))

    def _add_transfers(self, chunk: ChunkOperators, index: int, rank: int, count: int) -> None:
        for source, target in self._places.peers.get(index, ()):
            if source == rank:
                self._send(source, target, sum(map(_sent_bytes, chunk.sends)) * count)
                self._send(target, source, sum(map(_sent_bytes, chunk.sends_back)) * count)

    def _send(self, source: int, target: int, num_bytes: float) -> None:
        self._matrix.add("pp", self._devices(source), self._devices(target), num_bytes)

    def _add_agreement(self, node: OperatorNode, rank: int) -> None:
        """Add what ranks of several axes agree on: all of them, or those of tp and the pipeline."""
        devices, num_devices = self._devices(rank), self._scenario.layout.num_devices
        degree = int(node.dims["devices_per_node"] * node.dims["num_nodes"])
        tp = self._scenario.layout.tp
        if degree == num_devices:
            targets = (devices + 1) % num_devices
        else:
            is_last = devices % tp == tp - 1
            next_stage = (devices - (tp - 1) + self._stage_size) % num_devices
            targets = np.where(is_last, next_stage, devices + 1)
        self._matrix.add(node.axis, devices, targets, _sent_bytes(node))


def _collectives(nodes: Nodes | Iterator[OperatorNode]) -> Iterator[OperatorNode]:
    return (node for node in nodes if find_operator(node.operator).is_collective)


def _sent_bytes(node: OperatorNode) -> float:
    """Return what one rank sends in all repetitions."""
    moved = find_operator(node.operator).moved_bytes(node.dims, node.dtype.num_bytes)
    return float(moved) * node.repeat
