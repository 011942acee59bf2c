"""What a stage sends to the next one, in columns."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkCut
from foretoken.simulator.search.training.shapes import Shape
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.row_numbers import number_rows

# A rank and its peer of another stage on one node.
INSIDE = PlacedGroup(axis="pp", degree=2, dims={"devices_per_node": 2, "num_nodes": 1})
# What goes to the next stage: activations, and the mask that goes along forward.
_ROLES = ("stage_send", "stage_send_mask")


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """The calls of a transfer inside of a node and across nodes, one entry per strategy.

    `masks` go along forward; `is_across` tells of each chunk's output, (chunk, strategy).
    """

    sends: tuple[Ints, Ints]
    masks: tuple[Ints, Ints]
    is_across: Flags

    def of(self, rows: Ints, prices_us: Floats) -> "TransferTimes":
        """Return what the transfers of some strategies take."""
        backward = [prices_us[:, calls[rows]] for calls in self.sends]
        forward = [
            back + prices_us[:, calls[rows]] if calls.any() else back
            for back, calls in zip(backward, self.masks, strict=True)
        ]
        return TransferTimes(forward=forward, backward=backward, is_across=self.is_across[:, rows])


class TransferTimes:
    """What transfers take within a node and across nodes, (variant, strategy)."""

    def __init__(
        self, forward: Sequence[Floats], backward: Sequence[Floats], is_across: Flags
    ) -> None:
        """Keep the times, and of each chunk's output whether it goes across: (chunk, strategy)."""
        self._times = {"forward": forward, "backward": backward}
        self._is_across = is_across
        self._ways: list[bytes] = [row.tobytes() for row in is_across]
        self._known: dict[tuple[str, bytes], Floats] = {}

    def forward_us(self, chunk: int) -> Floats:
        """Return what a chunk's output takes: (variant, strategy)."""
        return self._pick("forward", chunk)

    def backward_us(self, chunk: int) -> Floats:
        """Return what the gradient of a chunk's output takes: (variant, strategy)."""
        return self._pick("backward", chunk)

    def way(self, chunk: int) -> bytes:
        """Return what is equal for chunks whose outputs go the same ways."""
        return self._ways[chunk]

    def _pick(self, way: str, chunk: int) -> Floats:
        key = way, self._ways[chunk]
        if key not in self._known:
            inside, across = self._times[way]
            self._known[key] = np.where(self._is_across[chunk], across, inside)
        return self._known[key]


class TransferWriter:
    """Writes the transfers of shapes to the book."""

    def __init__(self, shapes: tuple[Shape, ...], book: CallBook) -> None:
        """Keep the shapes, and what was written."""
        self._shapes = shapes
        self._book = book
        self._known: dict[tuple[int, int], Ints] = {}

    def write(
        self, shape: Ints, micro_batch: Ints, stride: Ints, cut: ChunkCut, rank: RankContext
    ) -> Transfers:
        """Return the transfers of strategies whose stages are `stride` ranks apart."""
        steps, of_step = np.unique(stride, return_inverse=True)
        across = [_across(cut, at_stride(rank, step)) for step in steps.tolist()]
        first, pair = number_rows([of_step, shape])
        sizes = [len(item.micro_batch_sizes) for item in self._shapes]
        table = np.zeros((4, len(first), max(sizes)), dtype=np.int64)
        for place, row in enumerate(first.tolist()):
            number = int(shape[row])
            table[:, place, : sizes[number]] = self._calls(number, int(stride[row]))
        calls, is_across = table[:, pair, micro_batch], np.stack(across, axis=1)[:, of_step]
        return Transfers((calls[0], calls[1]), (calls[2], calls[3]), is_across)

    def _calls(self, number: int, stride: int) -> Ints:
        """Return the calls of a shape: a send within a node, one across, masks likewise."""
        key = number, stride
        if key not in self._known:
            shape = self._shapes[number]
            rank = at_stride(shape.rank, stride)
            calls = [
                self._calls_over(group, shape)
                for group in (INSIDE, PlacedGroup.of_nodes("pp", rank))
            ]
            self._known[key] = np.stack(calls, axis=1).reshape(-1, len(shape.micro_batch_sizes))
        return self._known[key]

    def _calls_over(self, pair: PlacedGroup, shape: Shape) -> list[Ints]:
        """Return the calls of a send between two ranks, and of a mask, 0 where none is sent."""
        nodes = {node.role: node for node in shape.transfers_over(pair)}
        length = len(shape.micro_batch_sizes)
        none = np.zeros(length, dtype=np.int64)
        return [self._book.add(nodes[role], length) if role in nodes else none for role in _ROLES]


def at_stride(rank: RankContext, stride: int) -> RankContext:
    """Return a rank whose stages are so many ranks apart."""
    return dataclasses.replace(rank, layout=ParallelLayout(tp=stride))


def _across(cut: ChunkCut, rank: RankContext) -> Flags:
    """Tell of every chunk whether what it sends goes to another node."""
    last = len(cut.ranks) - 1

    def is_across(first: int, second: int) -> bool:
        return PlacedGroup.of_stages(first, second, rank).dims["num_nodes"] > 1

    return np.array(
        [
            is_across(source, target)
            or (cut.is_mirrored and is_across(last - source, last - target))
            for source, target in zip(cut.sources, cut.targets, strict=True)
        ]
    )
