"""What to know of an answer that is of no framework in particular."""

from foretoken.domain.frameworks.trainer import DEFAULT_TRAINER
from foretoken.domain.requests.scenario import TrainingScenario


def list_trainer_notes(scenario: TrainingScenario) -> tuple[str, ...]:
    """Return how an answer gets tighter where no framework was named."""
    if scenario.trainer.profile != DEFAULT_TRAINER:
        return ()
    note = (
        f"trainer {DEFAULT_TRAINER} is no framework in particular: name yours for its own kernels,"
        " overlap and memory (trainer.profile, --trainer; `foretoken list trainers`)"
    )
    return (note,)
