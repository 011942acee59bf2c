"""The training frameworks that files are written for."""

from collections.abc import Mapping

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
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
