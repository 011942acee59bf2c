"""The operators of one pipeline stage: per micro batch, and once per step."""

import dataclasses
from dataclasses import dataclass

from foretoken.domain.estimate import DType
from foretoken.domain.graph import BatchShape, OperatorNode, PrefillShape, RankContext, Section
from foretoken.domain.lowering import LoweringOptions, Nodes, lower_backward, lower_rank
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.parallelism.dp import gradient_reduction, shard_collective
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.training.zero import Sharding

# Gradients are accumulated and reduced in fp32 beside 16-bit weights.
# Source: Megatron-LM, --accumulate-allreduce-grads-in-fp32, its default with bf16.
GRADIENT_DTYPE = DType.FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOperators:
    """What one rank of a stage runs.

    `forward`, `recompute` and `backward` belong to one micro batch, in order; `sends` are the
    transfers to the next stage; `reduction` and `update` end the step.
    """

    rank: RankContext
    forward: Nodes
    recompute: Nodes
    backward: Nodes
    sends: Nodes
    reduction: Nodes
    update: Nodes

    @property
    def all_nodes(self) -> Nodes:
        """Every operator of the stage."""
        return (
            *self.forward,
            *self.recompute,
            *self.backward,
            *self.sends,
            *self.reduction,
            *self.update,
        )

    @property
    def num_params(self) -> int:
        """Parameters of one rank, before any sharding over data parallelism."""
        return sum(int(node.num_weights) for node in self.forward)

    @property
    def num_layer_params(self) -> int:
        """Parameters of one layer of one rank."""
        in_layers = (node for node in self.forward if node.section is Section.LAYER)
        return sum(int(node.num_weights) // node.repeat for node in in_layers)


def micro_batch_shape(scenario: TrainingScenario) -> BatchShape:
    """Return a micro batch of full sequences; every token has a label."""
    num_tokens = scenario.micro_batch_size * scenario.sequence_length
    prefill = prefill_dims(scenario.micro_batch_size, scenario.sequence_length, 0)
    return BatchShape(
        num_tokens=num_tokens, num_output_rows=num_tokens, prefill=PrefillShape(**prefill)
    )


def training_options(scenario: TrainingScenario) -> LoweringOptions:
    """Return what lowering has to know about a training run."""
    return LoweringOptions(dtype=scenario.dtype, has_loss=True)


def lower_stage(scenario: TrainingScenario, rank: RankContext) -> StageOperators:
    """Return the operators of one rank of a stage.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    nodes = lower_rank(micro_batch_shape(scenario), training_options(scenario), rank)
    forward = tuple(node for node in nodes if node.section is not Section.BOUNDARY)
    stage = StageOperators(
        rank=rank,
        forward=forward,
        recompute=_recomputed(forward) if scenario.recompute == "full" else (),
        backward=lower_backward(forward),
        sends=tuple(node for node in nodes if node.section is Section.BOUNDARY),
        reduction=(),
        update=(),
    )
    return _with_update(stage, scenario)


def _recomputed(forward: Nodes) -> Nodes:
    # Each layer runs again from its saved input; the embedding and the head do not.
    return tuple(
        dataclasses.replace(node, group="recompute")
        for node in forward
        if node.section is Section.LAYER
    )


def _with_update(stage: StageOperators, scenario: TrainingScenario) -> StageOperators:
    """Add what data parallelism and the optimizer do.

    ZeRO 1 scatters the gradient sums and gathers the new parameters, once per step. ZeRO 2 keeps
    no whole gradients, so it scatters after every micro batch. ZeRO 3 keeps no whole parameters
    either, so each layer gathers its own before either pass. All of it is exposed: nothing here
    overlaps with computation.
    """
    rank, sharding = stage.rank, Sharding.of_scenario(scenario)
    num_params, dtype = stage.num_params, scenario.dtype
    num_shards = rank.layout.dp if sharding.optimizer else 1
    update = (_adam(int(ceil_divide(num_params, num_shards)), dtype),)
    scatter = shard_collective("reduce_scatter", "gradient", num_params, GRADIENT_DTYPE, rank)
    gather = shard_collective("all_gather", "parameter", num_params, dtype, rank)
    if not sharding.optimizer:
        reduction = gradient_reduction(num_params, GRADIENT_DTYPE, rank)
        return dataclasses.replace(stage, reduction=reduction, update=update)
    if not sharding.gradients:
        return dataclasses.replace(stage, reduction=scatter, update=(*update, *gather))
    if not sharding.parameters:
        backward = (*stage.backward, *scatter)
        return dataclasses.replace(stage, backward=backward, update=(*update, *gather))
    gathers = _by_layer(stage, "all_gather", "parameter", dtype)
    scatters = _by_layer(stage, "reduce_scatter", "gradient", GRADIENT_DTYPE)
    return dataclasses.replace(
        stage,
        forward=(*gathers, *stage.forward),
        backward=(*gathers, *stage.backward, *scatters),
        update=update,
    )


def _by_layer(stage: StageOperators, operator: str, content: str, dtype: DType) -> Nodes:
    """Return a collective for every layer, and one for what is outside of layers."""
    rank, per_layer = stage.rank, stage.num_layer_params
    outside = stage.num_params - per_layer * rank.num_stage_layers
    layers = shard_collective(operator, content, per_layer, dtype, rank)
    nodes = tuple(dataclasses.replace(node, repeat=rank.num_stage_layers) for node in layers)
    if outside > 0:
        nodes += shard_collective(operator, content, outside, dtype, rank)
    return nodes


def _adam(num_params: int, dtype: DType) -> OperatorNode:
    return OperatorNode(
        role="optimizer_update",
        group="optimizer",
        section=Section.OPTIMIZER,
        operator="adam",
        dims={"num_params": num_params},
        dtype=dtype,
    )
