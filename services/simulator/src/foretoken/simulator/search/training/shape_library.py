"""The shapes of strategies, whose layers run the same operators: each lowered once for a search.

What a rank runs for a micro batch does not depend on how the layers are cut to a pipeline, on how
states are shared between replicas or on what is recomputed. So a shape is lowered as one rank that
holds the whole model, for all micro batch sizes at once: dimensions are columns where they depend
on it. Chunks of layers take of it what they hold.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import BatchShape, OperatorNode, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions, Nodes
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.parallelism.pp import stage_transfers
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import OVERLAPS
from foretoken.simulator.grid import Ints
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.memory import as_one_chunk
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.stage_operators import training_options
from foretoken.simulator.steps.strategies import Strategies


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """What one group of strategies runs.

    `scenario` is of one of them, without pipeline, sharded states and recomputation. Dimensions of
    `forward` and `backward` are integers, or columns with one entry for each of
    `micro_batch_sizes`; they repeat as often as the model has layers.
    """

    scenario: TrainingScenario
    trainer: TrainerProfile
    rank: RankContext
    options: LoweringOptions
    micro_batch_sizes: Ints
    forward: Nodes

    @property
    def key(self) -> tuple[object, ...]:
        """What tells the shape from all others of a space."""
        layout, scenario = self.rank.layout, self.scenario
        degrees = (layout.tp, layout.cp, layout.ep, scenario.sequence_parallel and layout.tp > 1)
        hides = self.trainer.overlaps_tensor_collectives and max(degrees) > 1
        return (*degrees, scenario.device, scenario.weight_parallel, scenario.weight_degree, hides)

    @cached_property
    def backward(self) -> Nodes:
        """The backward operators, lowered when first asked for."""
        return lower_backward(self.forward, self.options)

    @cached_property
    def stream(self) -> OperatorNode:
        """The operator that has what layers hand on: the norm at their beginning."""
        return next(node for node in self.forward if node.role == "input_norm")

    def transfers_over(self, pair: PlacedGroup) -> Nodes:
        """Return what a stage sends to the next over `pair`, and how that is put together."""
        training = self.options.training
        if training is None:
            raise ValueError("a shape is of a training run")
        return tuple(stage_transfers(self.stream, pair, self.rank, training))

    def forward_of(self, index: int) -> Nodes:
        """Return the forward operators of one of the micro batch sizes, in integers."""
        return tuple(_at(node, index) for node in self.forward)

    def backward_of(self, index: int) -> Nodes:
        """Return the backward operators of one of the micro batch sizes, in integers."""
        return tuple(_at(node, index) for node in self.backward)


def lower_shape(scenario: TrainingScenario, micro_batch_sizes: Ints) -> Shape:
    """Return the operators of a scenario's layers, whatever its pipeline.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    alone = as_one_chunk(scenario)
    trainer = alone.trainer.resolve()
    options = training_options(alone, trainer)
    (rank,) = chunk_ranks(alone)
    return Shape(
        scenario=alone,
        trainer=trainer,
        rank=rank,
        options=options,
        micro_batch_sizes=micro_batch_sizes,
        forward=lower_rank(_micro_batches(alone, micro_batch_sizes), options, rank),
    )


def _micro_batches(scenario: TrainingScenario, sizes: Ints) -> BatchShape:
    num_tokens = sizes * scenario.sequence_length
    prefill = PrefillShape(**prefill_dims(sizes, scenario.sequence_length, 0))
    return BatchShape(num_tokens=num_tokens, num_output_rows=num_tokens, prefill=prefill)


def _at(node: OperatorNode, index: int) -> OperatorNode:
    dims = {
        name: int(value[index]) if np.ndim(value) else int(value)
        for name, value in node.dims.items()
    }
    return dataclasses.replace(node, dims=dims)


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
