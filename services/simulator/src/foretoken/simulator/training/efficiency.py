"""How much of the devices' arithmetic a step uses."""

from foretoken.domain.frameworks.trainer import find_trainer
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.model_flops import count_model_flops
from foretoken.simulator.steps.stage_hardware import stage_devices
from foretoken.simulator.steps.stage_operators import (
    StepOperators,
    micro_batch_shape,
    training_options,
)

# Forward and backward work of the model over the forward work, recomputation not counted. Source:
# Chowdhery et al., PaLM, 2022, appendix B; unlike there, masked query-key pairs are not counted.
_FORWARD_AND_BACKWARD = 3


def count_step_flops(scenario: TrainingScenario) -> float:
    """Return the FLOPs a step needs on all devices, whichever kernels do them."""
    nodes = lower_forward(scenario.model, micro_batch_shape(scenario), _plain_options(scenario))
    num_runs = scenario.global_batch_size // scenario.micro_batch_size
    return count_model_flops(nodes) * _FORWARD_AND_BACKWARD * num_runs


def count_recomputed_flops(scenario: TrainingScenario, operators: StepOperators) -> float:
    """Return the FLOPs that all devices do a second time in a step."""
    layout = scenario.layout
    num_ranks = layout.num_devices // layout.pp
    per_rank = sum(count_model_flops(chunk.plan.recomputed) for chunk in operators.chunks)
    return per_rank * num_ranks * scenario.num_micro_batches


def peak_flops_per_s(scenario: TrainingScenario) -> float:
    """Return what all devices can do at most."""
    per_stage = scenario.layout.num_devices // scenario.layout.pp
    peaks = [find_device(name).peak_flops(scenario.dtype) for name in stage_devices(scenario)]
    return sum(peaks) * per_stage


def _plain_options(scenario: TrainingScenario) -> LoweringOptions:
    return training_options(scenario, find_trainer("plain"))
