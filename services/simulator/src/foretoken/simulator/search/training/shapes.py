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

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import BatchShape, OperatorNode, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions, Nodes
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.parallelism.pp import stage_transfers
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Ints
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.memory import as_one_chunk
from foretoken.simulator.steps.stage_operators import training_options


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
