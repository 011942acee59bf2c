"""The shapes of strategies, each lowered once for a search."""

from dataclasses import dataclass

import numpy as np

from foretoken.domain.requests.training_search import OVERLAPS
from foretoken.simulator.grid import Ints
from foretoken.simulator.search.training.shapes import Shape, lower_shape
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.strategies import Strategies

_ALL = OVERLAPS.index("all")
_Key = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShapeGroups:
    """The shapes of some strategies, and of each strategy its own.

    `of_strategy` and `micro_batch` have one entry per strategy: the number of its shape, and of its
    micro batch size among those of the shape.
    """

    shapes: tuple[Shape, ...]
    of_strategy: Ints
    micro_batch: Ints


class ShapeLibrary:
    """The shapes of one space that were lowered so far: a second call is given the same."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: dict[_Key, Shape] = {}
        self._of_layers: dict[_Key, Shape] = {}

    def group(self, strategies: Strategies) -> ShapeGroups:
        """Return the shapes of strategies that can run.

        Raises:
            InvalidRequestError: a layout does not fit the model.

        """
        layers, exchanges = _layer_axes(strategies), _exchange_axes(strategies)
        first, of_strategy = number_rows([*layers, *exchanges])
        sizes = np.unique(strategies.micro_batch_size)
        shapes = []
        for row in first.tolist():
            of_layers = tuple(int(axis[row]) for axis in layers)
            key = (*of_layers, *(int(axis[row]) for axis in exchanges))
            if not _covers(self._known.get(key), sizes):
                self._known[key] = lower_shape(strategies.scenario(row), sizes)
                self._of_layers.setdefault(of_layers, self._known[key])
            shapes.append(self._known[key])
        micro_batch = np.zeros(len(strategies), dtype=np.int64)
        for known in {id(shape.micro_batch_sizes): shape for shape in shapes}.values():
            is_own = np.array(
                [shape.micro_batch_sizes is known.micro_batch_sizes for shape in shapes]
            )
            rows = np.flatnonzero(is_own[of_strategy])
            micro_batch[rows] = np.searchsorted(
                known.micro_batch_sizes, strategies.micro_batch_size[rows]
            )
        return ShapeGroups(shapes=tuple(shapes), of_strategy=of_strategy, micro_batch=micro_batch)

    def group_layers(self, strategies: Strategies) -> tuple[tuple[Shape, ...], Ints]:
        """Return shapes that differ in what layers hold, and the number of each strategy's.

        Each has all micro batch sizes of the strategies.

        Raises:
            InvalidRequestError: a layout does not fit the model.

        """
        axes = _layer_axes(strategies)
        first, of_strategy = number_rows(axes)
        sizes = np.unique(strategies.micro_batch_size)
        shapes = []
        for row in first.tolist():
            key = tuple(int(axis[row]) for axis in axes)
            if not _covers(self._of_layers.get(key), sizes):
                self._of_layers[key] = lower_shape(strategies.scenario(row), sizes)
            shapes.append(self._of_layers[key])
        return tuple(shapes), of_strategy


def _covers(shape: Shape | None, sizes: Ints) -> bool:
    return shape is not None and bool(np.isin(sizes, shape.micro_batch_sizes).all())


def _layer_axes(strategies: Strategies) -> list[Ints]:
    """Return what changes what a layer holds for its backward pass.

    Over how many ranks `isp` keeps weights does not, nor what hides behind what.
    """
    return [
        *(strategies.tp, strategies.cp, strategies.ep),
        strategies.sequence_parallel * (strategies.tp > 1),
        strategies.weight_parallel,
    ]


def _exchange_axes(strategies: Strategies) -> list[Ints]:
    """Return what else makes layers run other operators."""
    is_split = (strategies.tp > 1) | (strategies.cp > 1) | (strategies.ep > 1)
    return [
        strategies.weight_degree,
        ((strategies.overlap == _ALL) & is_split).astype(np.int64),
        strategies.device,
    ]
