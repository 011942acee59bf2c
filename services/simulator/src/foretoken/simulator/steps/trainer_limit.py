"""Whether a training framework can do a strategy: its capabilities, over one or many strategies.

The same lines judge a scenario, which is one case, and every strategy of a search.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.frameworks.capability import MORE, describe_lack
from foretoken.domain.frameworks.trainer import (
    ASPECTS,
    OVERLAP_RULES,
    TrainerCapabilities,
)
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import WEIGHT_PARALLELS
from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.steps.recompute import selected_modules
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies, TrainerBound

_INTERLEAVED, _PLAIN = "interleaved", "one_f_one_b"
_NONE, _SELECTIVE, _FULL = range(len(RECOMPUTE_MODES))
_EXPERT_SPLITS = ("none", "tp", "one", "part")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedValues:
    """One case per strategy: places in `names`. A name that is a tuple has all its members."""

    places: Ints
    names: tuple[Any, ...]

    def are_of(self, values: Sequence[Any]) -> Flags:
        """Tell which have one of the values: any member of those that have several."""
        return self._look_up([not set(_members(name)).isdisjoint(values) for name in self.names])

    def are_within(self, values: Sequence[Any]) -> Flags:
        """Tell which have no other than the values."""
        return self._look_up([set(_members(name)) <= set(values) for name in self.names])

    def _look_up(self, found: list[bool]) -> Flags:
        flags: Flags = np.array(found, dtype=np.bool_)[self.places]
        return flags


# Degrees are numbers, all else names.
Values = Ints | NamedValues


def check_trainer(scenario: TrainingScenario) -> None:
    """Check that its framework can do what a scenario requires, which can run.

    Raises:
        InvalidRequestError: it cannot; every reason names the key to change.

    """
    trainer = scenario.trainer.resolve()
    bound = TrainerBound(name=trainer.name, can=trainer.can)
    violations = list_lacks(Strategies.of_scenario(scenario), bound)
    if violations:
        raise InvalidRequestError.of_violations(
            violations,
            f"{trainer.name} cannot run this (`--set trainer.profile=plain` simulates it by the"
            " rules of no framework)",
        )


def list_lacks(strategies: Strategies, bound: TrainerBound) -> list[FieldViolation]:
    """Return what a framework has not of some strategies."""
    return [
        FieldViolation(key, f"{bound.name}: {reason}")
        for key, reason, broken in _judge(strategies, bound.can)
        if broken.any()
    ]


def break_bound(strategies: Strategies, bound: TrainerBound) -> Flags:
    """Tell which strategies a framework cannot do."""
    broken: Flags = np.zeros(len(strategies), dtype=np.bool_)
    for _, _, flags in _judge(strategies, bound.can):
        broken |= flags
    return broken


def _judge(strategies: Strategies, can: TrainerCapabilities) -> Iterator[tuple[str, str, Flags]]:
    """Yield every limit: the key to change, why, and which strategies are beyond it."""
    for aspect, allowed in can.has.items():
        values = _find(strategies, aspect)
        beyond = ~_are_within(values, allowed)
        if beyond.any():
            first = _value_at(values, int(np.argmax(beyond)), allowed)
            yield ASPECTS[aspect], describe_lack(can.has, aspect, first), beyond
    for conflict in can.conflicts:
        both: Flags = np.ones(len(strategies), dtype=np.bool_)
        for aspect, wrong in conflict.of.items():
            both &= _are_of(_find(strategies, aspect), wrong)
        yield ASPECTS[conflict.aspect], conflict.why, both


def _are_of(values: Values, wanted: Sequence[Any]) -> Flags:
    if isinstance(values, NamedValues):
        return values.are_of(wanted)
    found: Flags = np.isin(values, [value for value in wanted if value != MORE])
    return found | (values > 1) if MORE in wanted else found


def _are_within(values: Values, wanted: Sequence[Any]) -> Flags:
    return values.are_within(wanted) if isinstance(values, NamedValues) else _are_of(values, wanted)


def _value_at(values: Values, row: int, allowed: Sequence[Any]) -> str:
    """Return what of a strategy's values is not allowed."""
    if not isinstance(values, NamedValues):
        return str(values[row])
    members = _members(values.names[int(values.places[row])])
    return ", ".join(str(member) for member in members if member not in allowed)


def _members(name: object) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)


def _find(strategies: Strategies, aspect: str) -> Values:
    """Return the values of an aspect of `ASPECTS`."""
    if aspect in OVERLAP_RULES:
        hidden = tuple(getattr(trainer, aspect) for trainer in strategies.source.trainers)
        return NamedValues(places=strategies.overlap, names=hidden)
    return _FINDERS[aspect](strategies)


def _flags(flags: Flags) -> NamedValues:
    return NamedValues(places=flags.astype(np.int64), names=(False, True))


def _same_for_all(strategies: Strategies, name: object) -> NamedValues:
    return NamedValues(places=np.zeros(len(strategies), dtype=np.int64), names=(name,))


def _find_schedule(strategies: Strategies) -> NamedValues:
    places, names = strategies.pipeline_schedule, strategies.source.pipeline_schedules
    is_plain = np.array([name == _INTERLEAVED for name in names])[places]
    is_plain &= strategies.chunks == 1
    return NamedValues(places=np.where(is_plain, len(names), places), names=(*names, _PLAIN))


def _find_exchange(strategies: Strategies) -> NamedValues:
    names = ("none", strategies.source.scenario.context_parallel)
    return NamedValues(places=(strategies.cp > 1).astype(np.int64), names=names)


def _has_experts(strategies: Strategies) -> bool:
    return bool(stack_of(strategies.source.scenario.model).experts)


def _find_expert_split(strategies: Strategies) -> NamedValues:
    if not _has_experts(strategies):
        return _same_for_all(strategies, "none")
    width = strategies.expert_width
    places = np.select([width == strategies.tp, width == 1], [1, 2], default=3)
    return NamedValues(places=places, names=_EXPERT_SPLITS)


def _find_modules(strategies: Strategies) -> NamedValues:
    is_selective = strategies.recompute == _SELECTIVE
    names = ((), selected_modules(strategies.source.scenario))
    return NamedValues(places=is_selective.astype(np.int64), names=names)


def _find_odd_sequences(strategies: Strategies) -> NamedValues:
    pieces = 2 * strategies.cp * strategies.tp
    return _flags(strategies.source.scenario.sequence_length % pieces != 0)


def _find_odd_experts(strategies: Strategies) -> NamedValues:
    is_whole = strategies.expert_width == 1
    ranks = strategies.shards * np.where(is_whole, strategies.tp, 1)
    has_experts = _has_experts(strategies)
    return _flags((strategies.zero_stage > 0) & (ranks % strategies.ep != 0) & has_experts)


def _find_partial_recompute(strategies: Strategies) -> NamedValues:
    layers, is_any = strategies.source.scenario.recompute_layers, strategies.recompute != _NONE
    return _flags(is_any & (layers > 0) & (layers < strategies.max_layers))


def _find_partitioned(strategies: Strategies) -> NamedValues:
    is_asked = strategies.source.scenario.partitions_activations
    return _flags((strategies.recompute == _FULL) & is_asked)


_FINDERS: Mapping[str, Callable[[Strategies], Values]] = {
    "tp": lambda strategies: strategies.tp,
    "pp": lambda strategies: strategies.pp,
    "cp": lambda strategies: strategies.cp,
    "ep": lambda strategies: strategies.ep,
    "virtual_stages": lambda strategies: strategies.chunks,
    "pipeline_schedule": _find_schedule,
    "uneven_layers": lambda strategies: _flags(strategies.has_unequal_chunks),
    "sequence_parallel": lambda strategies: _flags(
        (strategies.sequence_parallel > 0) & (strategies.tp > 1)
    ),
    "uneven_sequence": _find_odd_sequences,
    "context_parallel": _find_exchange,
    "weight_parallel": lambda strategies: NamedValues(
        places=strategies.weight_parallel, names=WEIGHT_PARALLELS
    ),
    "zero_stage": lambda strategies: strategies.zero_stage,
    "shards": lambda strategies: strategies.shards,
    "partial_shards": lambda strategies: _flags(
        (strategies.zero_stage > 0) & (strategies.shards < strategies.replicas)
    ),
    "uneven_shards": lambda strategies: _flags(
        (strategies.zero_stage > 0) & (strategies.shards % strategies.cp != 0)
    ),
    "experts": lambda strategies: _same_for_all(strategies, _has_experts(strategies)),
    "expert_tp": _find_expert_split,
    "uneven_experts": _find_odd_experts,
    "drops_tokens": lambda strategies: _same_for_all(
        strategies, strategies.source.scenario.moe_capacity_factor > 0
    ),
    "recompute": lambda strategies: NamedValues(places=strategies.recompute, names=RECOMPUTE_MODES),
    "recompute_modules": _find_modules,
    "partial_recompute": _find_partial_recompute,
    "partitions_activations": _find_partitioned,
    "dtype": lambda strategies: _same_for_all(
        strategies, strategies.source.scenario.dtype.name.lower()
    ),
}
