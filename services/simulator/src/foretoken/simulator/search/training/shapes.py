"""Strategies whose layers run the same operators: lowered once for all of them.

What a rank runs for a micro batch does not depend on how the layers are cut to a pipeline, on how
states are shared between replicas or on what is recomputed. So a shape is lowered as one rank that
holds the whole model, for all micro batch sizes at once: dimensions are columns where they depend
on it. Chunks of layers take of it what they hold.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretoken.domain.graph import BatchShape, OperatorNode, PrefillShape, RankContext
from foretoken.domain.lowering import LoweringOptions, Nodes, lower_backward, lower_rank
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerProfile
from foretoken.domain.training_search import OVERLAPS
from foretoken.simulator.grid import Ints
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.search.training.strategies import Strategies
from foretoken.simulator.training.stage_operators import training_options

_ALL = OVERLAPS.index("all")


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

    def forward_of(self, index: int) -> Nodes:
        """Return the forward operators of one of the micro batch sizes, in integers."""
        return tuple(_at(node, index) for node in self.forward)

    def backward_of(self, index: int) -> Nodes:
        """Return the backward operators of one of the micro batch sizes, in integers."""
        return tuple(_at(node, index) for node in self.backward)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShapeGroups:
    """The shapes of some strategies, and of each strategy its own.

    `of_strategy` and `micro_batch` have one entry per strategy: the number of its shape, and of its
    micro batch size among those of the shape.
    """

    shapes: tuple[Shape, ...]
    of_strategy: Ints
    micro_batch: Ints


def group_shapes(strategies: Strategies) -> ShapeGroups:
    """Return the shapes of strategies that can run.

    Raises:
        InvalidRequestError: a layout does not fit the model.

    """
    keys = _keys(strategies)
    first, of_strategy = number_rows(keys)
    shapes: list[Shape] = []
    micro_batch = np.zeros(len(strategies), dtype=np.int64)
    order = np.argsort(of_strategy, kind="stable")
    bounds = np.searchsorted(of_strategy[order], np.arange(len(first) + 1))
    for number, row in enumerate(first):
        rows = order[bounds[number] : bounds[number + 1]]
        sizes, micro_batch[rows] = np.unique(strategies.micro_batch_size[rows], return_inverse=True)
        scenario = strategies.take(np.array([row])).scenario(0)
        shapes.append(lower_shape(scenario, sizes))
    return ShapeGroups(shapes=tuple(shapes), of_strategy=of_strategy, micro_batch=micro_batch)


def lower_shape(scenario: TrainingScenario, micro_batch_sizes: Ints) -> Shape:
    """Return the operators of a scenario's layers, whatever its pipeline.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    alone = dataclasses.replace(
        scenario,
        layout=dataclasses.replace(scenario.layout, pp=1),
        virtual_stages=1,
        stage_layers=(),
        recompute="none",
        recompute_layers=0,
        recompute_modules=(),
        partitions_activations=False,
        zero_stage=0,
        shard_degree=0,
    )
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


def number_rows(columns: list[Ints]) -> tuple[Ints, Ints]:
    """Return the first row of every distinct combination of columns, and the number of each row's.

    Values are not negative.
    """
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        width = int(column.max(initial=0)) + 1
        _, number = np.unique(number * width + column, return_inverse=True)
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    return first, number


def _keys(strategies: Strategies) -> list[Ints]:
    """Return what makes layers run other operators."""
    tp, cp, ep = strategies.tp, strategies.cp, strategies.ep
    is_split = (tp > 1) | (cp > 1) | (ep > 1)
    return [
        strategies.device,
        tp,
        cp,
        ep,
        strategies.sequence_parallel * (tp > 1),
        strategies.weight_parallel,
        strategies.weight_degree,
        (strategies.overlap == _ALL) & is_split,
    ]


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
