"""What to know of an answer of no framework, or by the measurements of other software."""

from collections.abc import Iterable

from foretoken.domain.frameworks.trainer import DEFAULT_TRAINER
from foretoken.domain.measurements.estimate import LatencyColumns
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


def list_software_notes(
    answers: Iterable[tuple[str, LatencyColumns]], software: str
) -> tuple[str, ...]:
    """Return whose measurements stand in for those of the software that runs the operators.

    `answers` are operators with what the predictor said of their calls; one note for each software,
    in the order in which they first answer.
    """
    operators: dict[str, dict[str, None]] = {}
    for operator, answer in answers:
        if answer.other_framework:
            operators.setdefault(answer.other_framework, {})[operator] = None
    return tuple(
        f"{', '.join(sorted(names))}: measured under {framework}, not {software} (wider interval)"
        for framework, names in operators.items()
    )
