"""Which values of a space no strategy can have, because a framework has them in none.

They are cut before points are made of them, and counted all the same.
"""

from dataclasses import replace

import numpy as np

from foretoken.domain.frameworks.trainer import OVERLAP_RULES
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import OVERLAPS, TrainingSearchRequest
from foretoken.simulator.grid import Flags
from foretoken.simulator.launch.trainer import find_framework
from foretoken.simulator.steps.strategies import (
    AXES,
    Strategies,
    StrategySource,
    TrainerBound,
    trainer_with,
)
from foretoken.simulator.steps.trainer_limit import break_bound

# The axes that decide an aspect alone; all others depend on the whole strategy.
_CHUNKS = frozenset({"pipeline_schedule", "virtual_stages"})
_AXES_OF = {
    **{
        name: frozenset({name})
        for name in ("tp", "pp", "cp", "ep", "zero_stage", "weight_parallel", "recompute")
    },
    "virtual_stages": _CHUNKS,
    "pipeline_schedule": _CHUNKS,
    **dict.fromkeys(OVERLAP_RULES, frozenset({"overlap"})),
}
# What strategies have of the axes that a block does not set.
_NEUTRAL = {
    **dict.fromkeys(AXES, 0),
    **dict.fromkeys(("num_devices", "global_batch_size", "tp", "pp", "virtual_stages"), 1),
    **dict.fromkeys(("cp", "ep", "micro_batch_size"), 1),
}


def list_bounds(request: TrainingSearchRequest) -> tuple[TrainerBound, ...]:
    """Return what bounds a search: its trainer, and the framework that its answer is for.

    Raises:
        UnknownPluginError: no such trainer or framework.

    """
    trainer = request.scenario.trainer.resolve()
    found = [TrainerBound(name=trainer.name, can=trainer.can)]
    if request.space.framework:
        framework = find_framework(request.space.framework)
        found.append(TrainerBound(name=framework.name, can=framework.can))
    return tuple(found)


def find_possible(
    source: StrategySource, names: tuple[str, ...], rows: tuple[tuple[int, ...], ...]
) -> Flags:
    """Tell which combinations of values of some axes a strategy can have.

    Of overlaps that hide the same, as a framework has not all of them to turn on and off, the first
    is left.
    """
    possible: Flags = np.ones(len(rows), dtype=np.bool_)
    table = np.array(rows, dtype=np.int64)
    columns = {name: np.full(len(rows), value) for name, value in _NEUTRAL.items()}
    columns |= {name: table[:, place] for place, name in enumerate(names)}
    strategies = Strategies(source=source, **columns)
    for bound in source.bounds:
        possible &= ~break_bound(strategies, _of_axes(bound, frozenset(names)))
    if names == ("overlap",):
        possible &= _hide_something_else(source.scenario, table[:, 0].tolist())
    return possible


def _of_axes(bound: TrainerBound, axes: frozenset[str]) -> TrainerBound:
    """Return what of a bound these axes decide."""

    def is_decided(aspect: str) -> bool:
        return aspect in _AXES_OF and _AXES_OF[aspect] <= axes

    can = replace(
        bound.can,
        has={aspect: values for aspect, values in bound.can.has.items() if is_decided(aspect)},
        conflicts=tuple(item for item in bound.can.conflicts if all(map(is_decided, item.of))),
    )
    return replace(bound, can=can)


def _hide_something_else(scenario: TrainingScenario, codes: list[int]) -> Flags:
    """Tell which overlaps hide something else than those before them."""
    trainers = [trainer_with(scenario.trainer, OVERLAPS[code]).resolve() for code in codes]
    hidden = [tuple(getattr(item, rule) for rule in OVERLAP_RULES) for item in trainers]
    return np.array([hidden.index(rules) == place for place, rules in enumerate(hidden)])
