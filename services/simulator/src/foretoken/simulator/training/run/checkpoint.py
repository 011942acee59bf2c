"""How large a checkpoint is, and how long a run takes to write one."""

from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import FailureRules

# Adam's first and second moment.
_NUM_MOMENTS = 2


def count_checkpoint_bytes(scenario: TrainingScenario) -> float:
    """Return the bytes of parameters and optimizer, each written once whoever holds copies.

    They are those that devices hold: weights in the compute format next to the optimizer's own,
    unless the trainer trains the latter.
    """
    trainer = scenario.trainer.resolve()
    per_param = trainer.master_dtype.num_bytes + _NUM_MOMENTS * trainer.moment_dtype.num_bytes
    if not trainer.trains_master_weights:
        per_param += scenario.dtype.kept_in_training.num_bytes
    return count_parameters(scenario.model).total * per_param


def write_s(scenario: TrainingScenario, failures: FailureRules) -> float:
    """Return how long a checkpoint takes to write, by all devices of a site at once."""
    if failures.checkpoint_s:
        return failures.checkpoint_s
    bytes_per_s = failures.checkpoint_bytes_per_s * scenario.layout.num_devices
    return count_checkpoint_bytes(scenario) / bytes_per_s
