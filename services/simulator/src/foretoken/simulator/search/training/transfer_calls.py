"""What stages send to the next one: the calls of transfers near and across nodes."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.shape_library import Shape
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.row_numbers import number_rows

# A rank and its peer of another stage on one node.
_INSIDE = PlacedGroup(axis="pp", degree=2, dims={"devices_per_node": 2, "num_nodes": 1})
# What goes to the next stage: activations, and the mask that goes along forward.
_ROLES = ("stage_send", "stage_send_mask")


@dataclass(frozen=True, slots=True, eq=False)
class TransferCalls:
    """The calls of transfers, [send or mask, near or across, case]; masks go along forward."""

    numbers: Ints

    def time(self, rows: Ints, prices_us: Floats) -> tuple[Floats, Floats]:
        """Return what the transfers of some cases take forward, and back.

        Both are [near or across, variant, case].
        """
        sent, mask = (np.moveaxis(prices_us[:, calls[:, rows]], 1, 0) for calls in self.numbers)
        return (sent + mask if self.numbers[1].any() else sent), sent


class TransferWriter:
    """Writes the transfers of shapes to the book."""

    def __init__(self, shapes: tuple[Shape, ...], book: CallBook) -> None:
        """Keep the shapes, and what was written."""
        self._shapes = shapes
        self._book = book
        self._known: dict[tuple[int, int], Ints] = {}

    def write(self, shape: Ints, micro_batch: Ints, stride: Ints) -> TransferCalls:
        """Return the transfers of strategies whose stages are `stride` ranks apart."""
        first, pair = number_rows([stride, shape])
        sizes = [len(item.micro_batch_sizes) for item in self._shapes]
        table = np.zeros((2, 2, len(first), max(sizes)), dtype=np.int64)
        for place, row in enumerate(first.tolist()):
            number = int(shape[row])
            table[:, :, place, : sizes[number]] = self._calls(number, int(stride[row]))
        return TransferCalls(table[:, :, pair, micro_batch])

    def _calls(self, number: int, stride: int) -> Ints:
        """Return the calls of a shape: [send or mask, near or across, micro batch size]."""
        key = number, stride
        if key not in self._known:
            shape = self._shapes[number]
            rank = at_stride(shape.rank, stride)
            calls = [
                self._calls_over(group, shape)
                for group in (near_pair(rank), PlacedGroup.of_nodes("pp", rank))
            ]
            self._known[key] = np.stack(calls, axis=1)
        return self._known[key]

    def _calls_over(self, pair: PlacedGroup, shape: Shape) -> list[Ints]:
        """Return the calls of a send between two ranks, and of a mask, 0 where none is sent."""
        nodes = {node.role: node for node in shape.transfers_over(pair)}
        length = len(shape.micro_batch_sizes)
        none = np.zeros(length, dtype=np.int64)
        return [self._book.add(nodes[role], length) if role in nodes else none for role in _ROLES]


def near_pair(rank: RankContext) -> PlacedGroup:
    """Return a rank and its nearest peer of another stage: on its node, if that has another."""
    return _INSIDE if rank.devices_per_node > 1 else PlacedGroup.of_nodes("pp", rank)


def at_stride(rank: RankContext, stride: int) -> RankContext:
    """Return a rank whose stages are so many ranks apart."""
    return dataclasses.replace(rank, layout=ParallelLayout(tp=stride))
