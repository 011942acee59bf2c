"""What occupies a device of each stage when it holds the most.

Weights are in the compute format. Saved activations follow the schedule: a stage holds as many
micro batches at once as it has run forward and not yet backward.
"""

from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, Section
from foretoken.domain.operator import find_operator
from foretoken.domain.report import StageMemory
from foretoken.domain.scenario import TrainingScenario
from foretoken.simulator.training.stage_operators import GRADIENT_DTYPE, StageOperators
from foretoken.simulator.training.zero import Sharding

# Adam in fp32: master weight and two moments. Source: Rajbhandari et al., ZeRO, 2020.
_NUM_OPTIMIZER_VALUES = 3

# Bytes a caching allocator reserves per byte of tensors. Source: SimuMax's memory records of B200
# runs, reserved over allocated, mean (1.028 to 1.093).
RESERVED_RATIO = 1.048


def measure_stage(
    stage: StageOperators, scenario: TrainingScenario, num_in_flight: int
) -> StageMemory:
    """Return the peak of one stage, whose schedule holds `num_in_flight` micro batches."""
    sharding, dp = Sharding.of_scenario(scenario), scenario.layout.dp
    num_params = stage.num_params
    optimizer_bytes = DType.FP32.bytes_of(num_params) * _NUM_OPTIMIZER_VALUES
    return StageMemory(
        stage=stage.rank.stage,
        weights_bytes=scenario.dtype.bytes_of(num_params) / (dp if sharding.parameters else 1),
        gradients_bytes=GRADIENT_DTYPE.bytes_of(num_params) / (dp if sharding.gradients else 1),
        optimizer_bytes=optimizer_bytes / (dp if sharding.optimizer else 1),
        activations_bytes=float(_saved_bytes(stage, scenario) * num_in_flight),
        temporary_bytes=float(_temporary_bytes(stage, scenario)),
    )


def _saved_bytes(stage: StageOperators, scenario: TrainingScenario) -> int:
    """Return what one micro batch leaves behind for its backward pass."""
    if scenario.recompute == "none":
        return sum(_saved_by(node) * node.repeat for node in stage.forward)
    num_tokens = scenario.micro_batch_size * scenario.sequence_length
    layer_input = scenario.dtype.bytes_of(num_tokens * scenario.model.hidden)
    outside = (node for node in stage.forward if node.section is not Section.LAYER)
    saved = sum(_saved_by(node) * node.repeat for node in outside)
    return int(layer_input * stage.rank.num_stage_layers + saved)


def _temporary_bytes(stage: StageOperators, scenario: TrainingScenario) -> int:
    """Return the largest passing need: an output with its gradient, and one layer being rebuilt.

    A layer is rebuilt from its input when recomputed, and from its shards under ZeRO 2 and 3.
    """
    sharding = Sharding.of_scenario(scenario)
    outputs = (node for node in stage.forward if node.operator == "gemm")
    temporary = max(2 * node.dtype.bytes_of(node.dims["m"] * node.dims["n"]) for node in outputs)
    if scenario.recompute == "full":
        layer = (node for node in stage.forward if node.section is Section.LAYER)
        temporary += sum(_saved_by(node) for node in layer)
    if sharding.gradients:
        temporary += GRADIENT_DTYPE.bytes_of(stage.num_layer_params)
    if sharding.parameters:
        temporary += scenario.dtype.bytes_of(stage.num_layer_params)
    return int(temporary)


def _saved_by(node: OperatorNode) -> int:
    return int(node.dtype.bytes_of(find_operator(node.operator).saved_elements(node.dims)))
