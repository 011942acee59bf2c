"""Whether a training framework can do a strategy: its capabilities, over one or many strategies.

The same lines judge a scenario, as columns of one entry, and every strategy of a search.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.domain.capability import MORE, describe_lack
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerProfile
from foretoken.domain.trainer_capability import ASPECTS, OVERLAP_RULES, TrainerCapabilities
from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.training.recompute import selected_modules
from foretoken.simulator.training.schedule import find_schedule
from foretoken.simulator.training.zero import num_replicas

_INTERLEAVED, _PLAIN = "interleaved", "one_f_one_b"
_EXPERT_SPLITS = ("none", "tp", "one", "part")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerBound:
    """What one framework can do, by the name that its users know."""

    name: str
    can: TrainerCapabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedValues:
    """One entry per strategy: places in `names`. A name that is a tuple has all its members."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFigures:
    """What capabilities are judged by; one entry per strategy in each column.

    `chunks` are those of layers per rank, `layers_differ` tells of unequal ones, and `max_layers`
    are those of the largest. `replicas` hold the same parameters. `trainers` are the rules that
    `trainer` numbers. `scenario` has what no strategy changes.
    """

    scenario: TrainingScenario
    trainers: Sequence[TrainerProfile]
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    chunks: Ints
    layers_differ: Flags
    max_layers: Ints
    replicas: Ints
    zero_stage: Ints
    shard_degree: Ints
    splits_tokens: Flags
    pipeline_schedule: NamedValues
    weight_parallel: NamedValues
    recompute: NamedValues
    trainer: Ints

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> "StrategyFigures":
        """Return the figures of one scenario, which must be one that can run."""
        layout = scenario.layout
        schedule = find_schedule(scenario.pipeline_schedule)
        chunks = schedule.virtual_stages or scenario.virtual_stages
        num_chunks, num_layers = layout.pp * chunks, scenario.model.num_layers
        given = scenario.stage_layers
        numbers = {
            "tp": layout.tp,
            "pp": layout.pp,
            "cp": layout.cp,
            "ep": layout.ep,
            "chunks": chunks,
            "max_layers": max(given, default=-(-num_layers // num_chunks)),
            "replicas": num_replicas(scenario),
            "zero_stage": scenario.zero_stage,
            "shard_degree": scenario.shard_degree,
            "trainer": 0,
        }
        differ = len(set(given)) > 1 if given else num_layers % num_chunks != 0
        return cls(
            scenario=scenario,
            trainers=(scenario.trainer.resolve(),),
            layers_differ=np.array([differ]),
            splits_tokens=np.array([scenario.sequence_parallel]),
            pipeline_schedule=_alone(scenario.pipeline_schedule),
            weight_parallel=_alone(scenario.weight_parallel),
            recompute=_alone(scenario.recompute),
            **{name: np.array([value]) for name, value in numbers.items()},
        )

    def __len__(self) -> int:
        """Return the number of strategies."""
        return len(self.tp)

    def find(self, aspect: str) -> Values:
        """Return the values of an aspect of `ASPECTS`."""
        if aspect in OVERLAP_RULES:
            hidden = tuple(getattr(trainer, aspect) for trainer in self.trainers)
            return NamedValues(places=self.trainer, names=hidden)
        return _FINDERS[aspect](self)

    @property
    def shards(self) -> Ints:
        """Ranks that states are split over; 1 without ZeRO."""
        wanted = np.where(self.shard_degree > 0, self.shard_degree, self.replicas)
        shards: Ints = np.where(self.zero_stage > 0, wanted, 1)
        return shards

    @property
    def expert_width(self) -> Ints:
        """Ranks that an expert is split over, as `expert_mesh`."""
        if self.scenario.expert_tp:
            return np.full(len(self), self.scenario.expert_tp)
        width: Ints = np.where(self.tp % self.ep == 0, self.tp // self.ep, 1)
        return width


def check_trainer(scenario: TrainingScenario) -> None:
    """Check that its framework can do what a scenario asks for, which can run.

    Raises:
        InvalidRequestError: it cannot; every reason names the key to change.

    """
    trainer = scenario.trainer.resolve()
    bound = TrainerBound(name=trainer.name, can=trainer.can)
    violations = list_lacks(StrategyFigures.of_scenario(scenario), bound)
    if violations:
        raise InvalidRequestError.of_violations(
            violations,
            f"{trainer.name} cannot run this (`--set trainer.profile=plain` simulates it by the"
            " rules of no framework)",
        )


def list_lacks(figures: StrategyFigures, bound: TrainerBound) -> list[FieldViolation]:
    """Return what a framework has not of some strategies."""
    return [
        FieldViolation(key, f"{bound.name}: {reason}")
        for key, reason, broken in _judge(figures, bound.can)
        if broken.any()
    ]


def break_bound(figures: StrategyFigures, bound: TrainerBound) -> Flags:
    """Tell which strategies a framework cannot do."""
    broken: Flags = np.zeros(len(figures), dtype=np.bool_)
    for _, _, flags in _judge(figures, bound.can):
        broken |= flags
    return broken


def _judge(figures: StrategyFigures, can: TrainerCapabilities) -> Iterator[tuple[str, str, Flags]]:
    """Yield every limit: the key to change, why, and which strategies are beyond it."""
    for aspect, allowed in can.has.items():
        values = figures.find(aspect)
        beyond = ~_are_within(values, allowed)
        if beyond.any():
            first = _value_at(values, int(np.argmax(beyond)), allowed)
            yield ASPECTS[aspect], describe_lack(can.has, aspect, first), beyond
    for conflict in can.conflicts:
        both: Flags = np.ones(len(figures), dtype=np.bool_)
        for aspect, wrong in conflict.of.items():
            both &= _are_of(figures.find(aspect), wrong)
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


def _alone(name: object) -> NamedValues:
    return NamedValues(places=np.zeros(1, dtype=np.int64), names=(name,))


def _flags(flags: Flags) -> NamedValues:
    return NamedValues(places=flags.astype(np.int64), names=(False, True))


def _same_for_all(figures: StrategyFigures, name: object) -> NamedValues:
    return NamedValues(places=np.zeros(len(figures), dtype=np.int64), names=(name,))


def _find_schedule(figures: StrategyFigures) -> NamedValues:
    given = figures.pipeline_schedule
    is_plain = np.array([name == _INTERLEAVED for name in given.names])[given.places]
    is_plain &= figures.chunks == 1
    return NamedValues(
        places=np.where(is_plain, len(given.names), given.places), names=(*given.names, _PLAIN)
    )


def _find_exchange(figures: StrategyFigures) -> NamedValues:
    names = ("none", figures.scenario.context_parallel)
    return NamedValues(places=(figures.cp > 1).astype(np.int64), names=names)


def _find_expert_split(figures: StrategyFigures) -> NamedValues:
    if figures.scenario.model.moe is None:
        return _same_for_all(figures, "none")
    width = figures.expert_width
    places = np.select([width == figures.tp, width == 1], [1, 2], default=3)
    return NamedValues(places=places, names=_EXPERT_SPLITS)


def _find_modules(figures: StrategyFigures) -> NamedValues:
    given = figures.recompute
    is_selective = np.array([name == "selective" for name in given.names])[given.places]
    names = ((), selected_modules(figures.scenario))
    return NamedValues(places=is_selective.astype(np.int64), names=names)


def _find_odd_sequences(figures: StrategyFigures) -> NamedValues:
    pieces = 2 * figures.cp * figures.tp
    return _flags(figures.scenario.sequence_length % pieces != 0)


def _find_odd_experts(figures: StrategyFigures) -> NamedValues:
    is_whole = figures.expert_width == 1
    ranks = figures.shards * np.where(is_whole, figures.tp, 1)
    has_experts = figures.scenario.model.moe is not None
    return _flags((figures.zero_stage > 0) & (ranks % figures.ep != 0) & has_experts)


def _find_partial_recompute(figures: StrategyFigures) -> NamedValues:
    given, layers = figures.recompute, figures.scenario.recompute_layers
    is_any = np.array([name != "none" for name in given.names])[given.places]
    return _flags(is_any & (layers > 0) & (layers < figures.max_layers))


def _find_partitioned(figures: StrategyFigures) -> NamedValues:
    given, is_asked = figures.recompute, figures.scenario.partitions_activations
    is_full = np.array([name == "full" for name in given.names])[given.places]
    return _flags(is_full & is_asked)


_FINDERS: Mapping[str, Callable[[StrategyFigures], Values]] = {
    "tp": lambda figures: figures.tp,
    "pp": lambda figures: figures.pp,
    "cp": lambda figures: figures.cp,
    "ep": lambda figures: figures.ep,
    "virtual_stages": lambda figures: figures.chunks,
    "pipeline_schedule": _find_schedule,
    "uneven_layers": lambda figures: _flags(figures.layers_differ),
    "sequence_parallel": lambda figures: _flags(figures.splits_tokens & (figures.tp > 1)),
    "uneven_sequence": _find_odd_sequences,
    "context_parallel": _find_exchange,
    "weight_parallel": lambda figures: figures.weight_parallel,
    "zero_stage": lambda figures: figures.zero_stage,
    "shards": lambda figures: figures.shards,
    "partial_shards": lambda figures: _flags(
        (figures.zero_stage > 0) & (figures.shards < figures.replicas)
    ),
    "uneven_shards": lambda figures: _flags(
        (figures.zero_stage > 0) & (figures.shards % figures.cp != 0)
    ),
    "experts": lambda figures: _same_for_all(figures, figures.scenario.model.moe is not None),
    "expert_tp": _find_expert_split,
    "uneven_experts": _find_odd_experts,
    "recompute": lambda figures: figures.recompute,
    "recompute_modules": _find_modules,
    "partial_recompute": _find_partial_recompute,
    "partitions_activations": _find_partitioned,
    "dtype": lambda figures: _same_for_all(figures, figures.scenario.dtype.name.lower()),
}
