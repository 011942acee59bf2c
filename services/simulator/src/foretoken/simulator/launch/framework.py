"""The training frameworks that files are written for."""

from collections.abc import Mapping

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.trainer import TrainingFramework


def all_frameworks() -> Mapping[str, TrainingFramework]:
    """Return every framework by its name: one module each in `trainers/`."""
    modules: Mapping[str, TrainingFramework] = scan_modules(
        "foretoken.simulator.launch.trainers", "TRAINER"
    )
    return {trainer.name: trainer for trainer in modules.values()}


def find_framework(name: str) -> TrainingFramework:
    """Return how the framework of this name is started.

    Raises:
        UnknownPluginError: no files are written for it.

    """
    return UnknownPluginError.look_up(name, all_frameworks(), "framework", "framework")


def choose_framework(scenario: TrainingScenario, name: str = "") -> TrainingFramework:
    """Return the framework of a name, or the one that the scenario's trainer describes.

    Raises:
        UnknownPluginError: no files are written for a framework of that name.
        InvalidRequestError: none is named, and none for the trainer.

    """
    if name:
        return find_framework(name)
    profile = scenario.trainer.profile
    for framework in all_frameworks().values():
        if profile in framework.profiles:
            return framework
    raise InvalidRequestError.of_field(
        "trainer.profile",
        f"files are written for {', '.join(all_frameworks())}, not for {profile}: choose one with"
        " --framework",
    )
