"""Strategies as columns: one case each, and the scenario that any of them stands for.

A search makes columns of the points of a space; a scenario is the columns of a single case. What
follows from the degrees alone (`dp`, `replicas`, `chunks`, ...) is derived here, for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerCapabilities, TrainerProfile, TrainerSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import OVERLAPS, WEIGHT_PARALLELS
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.steps.axes import PerCase
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.sharding import Degrees, ScenarioDegrees, cut_shards

RECOMPUTE_MODES = ("none", "selective", "full")
_NONE, _SELECTIVE, _FULL = range(len(RECOMPUTE_MODES))
_ISP = WEIGHT_PARALLELS.index("isp")
# What each of `OVERLAPS` hides: nothing, what data-parallel ranks exchange, all collectives.
_DATA_RULES = ("overlaps_gradient_reduction", "overlaps_parameter_gather")
_OTHER_RULES = (
    "overlaps_tensor_collectives",
    "overlaps_tensor_gradients",
    "overlaps_expert_exchange",
    "overlaps_context_exchange",
)


_DEGREES = (
    *("num_devices", "tp", "pp", "cp", "ep", "zero_stage", "shard_degree", "weight_degree"),
)
# What the trainer of a scenario hides, as it is.
AS_GIVEN = ("",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerBound:
    """What one framework can do, by the name that its users know."""

    name: str
    can: TrainerCapabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySource:
    """What all strategies of a space have: the scenario they vary, and the names of codes.

    `varied` are the axes of which the space has several values; names tell of some only then.
    `bounds` are what frameworks can do: a strategy that one of them cannot do is none.
    """

    scenario: TrainingScenario
    devices: tuple[str, ...]
    pipeline_schedules: tuple[str, ...]
    overlaps: tuple[str, ...] = OVERLAPS
    varied: frozenset[str] = frozenset()
    bounds: tuple[TrainerBound, ...] = ()

    @property
    def trainers(self) -> list[TrainerProfile]:
        """The rules of the framework under each overlap."""
        trainer = self.scenario.trainer
        return [trainer_with(trainer, overlap).resolve() for overlap in self.overlaps]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Strategies(Degrees):
    """One case per strategy in each column.

    Texts are codes: `device`, `pipeline_schedule` and `overlap` into the names of `source`,
    `recompute` into `RECOMPUTE_MODES`, `weight_parallel` into `WEIGHT_PARALLELS`.
    `sequence_parallel` is 0 or 1. `weight_degree` is 0 except for `isp`, where it is never 0;
    `shard_degree` is 0 for all ranks that hold the same, and without ZeRO.
    `cp` times `tp` times `pp` need not divide `num_devices`; `dp` is what they leave, rounded down.
    """

    source: StrategySource
    device: PerCase
    num_devices: PerCase
    global_batch_size: PerCase
    tp: PerCase
    pp: PerCase
    virtual_stages: PerCase
    cp: PerCase
    ep: PerCase
    micro_batch_size: PerCase
    sequence_parallel: PerCase
    zero_stage: PerCase
    shard_degree: PerCase
    overlap: PerCase
    recompute: PerCase
    weight_parallel: PerCase
    weight_degree: PerCase
    pipeline_schedule: PerCase

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> "Strategies":
        """Return the columns of a scenario, which is a single case."""
        degrees = ScenarioDegrees.of(scenario)
        values = {
            **{name: getattr(degrees, name) for name in _DEGREES},
            "device": 0,
            "global_batch_size": scenario.global_batch_size,
            "virtual_stages": scenario.virtual_stages,
            "micro_batch_size": scenario.micro_batch_size,
            "sequence_parallel": int(scenario.sequence_parallel),
            "overlap": 0,
            "recompute": RECOMPUTE_MODES.index(scenario.recompute),
            "weight_parallel": WEIGHT_PARALLELS.index(scenario.weight_parallel),
            "pipeline_schedule": 0,
        }
        source = StrategySource(
            scenario=scenario,
            devices=(scenario.device,),
            pipeline_schedules=(scenario.pipeline_schedule,),
            overlaps=AS_GIVEN,
        )
        columns = {name: np.array([value], dtype=np.int64) for name, value in values.items()}
        return Strategies(source=source, **columns)

    def __len__(self) -> int:
        """Return the number of strategies."""
        return len(self.tp)

    @property
    def num_micro_batches(self) -> Ints:
        """Micro batches of each replica in a step, rounded down; 0 without a replica."""
        step_samples: Ints = np.maximum(1, self.dp * self.micro_batch_size)
        return self.global_batch_size // step_samples

    @property
    def base(self) -> TrainingScenario:
        """The scenario whose degrees the cases vary."""
        return self.source.scenario

    def _cut(self, num_ranks: Ints, wanted: Ints) -> Ints:
        first, number = number_rows([num_ranks, wanted])
        pairs = zip(num_ranks[first].tolist(), wanted[first].tolist(), strict=True)
        return np.array([cut_shards(*pair) for pair in pairs], dtype=np.int64)[number]

    @property
    def needed_chunks(self) -> Ints:
        """Chunks of layers per rank that the schedule needs; 0: as many as there are."""
        names = self.source.pipeline_schedules
        needed = np.array([find_schedule(name).virtual_stages for name in names], dtype=np.int64)
        return needed[self.pipeline_schedule]

    @property
    def chunks(self) -> Ints:
        """Chunks of layers per rank, as many as the schedule needs."""
        needed = self.needed_chunks
        chunks: Ints = np.where(needed > 0, needed, self.virtual_stages)
        return chunks

    @property
    def max_layers(self) -> Ints:
        """Layers of the largest chunk."""
        scenario = self.source.scenario
        if scenario.stage_layers:
            return np.full(len(self), max(scenario.stage_layers))
        most: Ints = ceil_divide(scenario.model.num_layers, self.pp * self.chunks)
        return most

    @property
    def has_unequal_chunks(self) -> Flags:
        """Which have chunks with different numbers of layers."""
        scenario = self.source.scenario
        if scenario.stage_layers:
            return np.full(len(self), len(set(scenario.stage_layers)) > 1)
        return np.asarray(scenario.model.num_layers % (self.pp * self.chunks) != 0)

    @property
    def axes(self) -> tuple[str, ...]:
        """The columns: what tells strategies of one source apart."""
        return AXES

    def take(self, rows: np.ndarray) -> Self:
        """Return some strategies, in that order, by their rows or a mask."""
        return replace(self, **{name: getattr(self, name)[rows] for name in self.axes})

    def scenario(self, row: int) -> TrainingScenario:
        """Return the scenario of one strategy for the simulator; its dp must be at least 1.

        What the space does not vary is the source's. Settings that go with a mode are kept with it
        alone: the modules of `selective`, the split inputs of `full`.

        Raises:
            InvalidRequestError: the degrees are more than the devices.

        """
        base = self.source.scenario
        own = {name: int(getattr(self, name)[row]) for name in AXES}
        recompute = own["recompute"]
        device = self.source.devices[own["device"]]
        return replace(
            base,
            name=self.name(row),
            device=device,
            topology=base.topology if device == base.device else "",
            layout=ParallelLayout(
                tp=own["tp"], pp=own["pp"], dp=int(self.dp[row]), cp=own["cp"], ep=own["ep"]
            ),
            micro_batch_size=own["micro_batch_size"],
            global_batch_size=own["global_batch_size"],
            trainer=trainer_with(base.trainer, self.source.overlaps[own["overlap"]]),
            pipeline_schedule=self.source.pipeline_schedules[own["pipeline_schedule"]],
            virtual_stages=own["virtual_stages"],
            recompute=RECOMPUTE_MODES[recompute],
            recompute_layers=base.recompute_layers if recompute != _NONE else 0,
            recompute_modules=base.recompute_modules if recompute == _SELECTIVE else (),
            partitions_activations=base.partitions_activations and recompute == _FULL,
            zero_stage=own["zero_stage"],
            shard_degree=own["shard_degree"],
            sequence_parallel=bool(own["sequence_parallel"]),
            weight_parallel=WEIGHT_PARALLELS[own["weight_parallel"]],
            weight_degree=own["weight_degree"],
        )

    def name(self, row: int) -> str:
        """Return what tells a strategy from all others of its space."""
        return self.names(np.array([row]))[0]

    def overlaps(self) -> list[str]:
        """Return what each hides, by the names of the source."""
        return [self.source.overlaps[code] for code in self.overlap.tolist()]

    def placements(self) -> list[str]:
        """Return the devices of the stages where they differ; here they are alike."""
        return [""] * len(self)

    def stage_cuts(self) -> list[str]:
        """Return the layers of every chunk where they are not cut evenly; here they are."""
        return [""] * len(self)

    def names(self, rows: np.ndarray) -> list[str]:
        """Return the names of some strategies."""
        chosen = self.take(rows)
        columns = (getattr(chosen, name).tolist() for name in AXES)
        return [
            _describe(dict(zip(AXES, values, strict=True)), dp, self.source)
            for dp, *values in zip(chosen.dp.tolist(), *columns, strict=True)
        ]


AXES = tuple(item.name for item in fields(Strategies) if item.name != "source")
StrategiesT = TypeVar("StrategiesT", bound=Strategies)


def join_strategies(parts: Sequence[StrategiesT]) -> StrategiesT:
    """Return all strategies together; they have one source, and there is at least one part."""
    first = parts[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in first.axes
    }
    return replace(first, **columns)


def trainer_with(trainer: TrainerSpec, overlap: str) -> TrainerSpec:
    """Return a framework that hides what one of `OVERLAPS` says of what users turn on and off.

    Without an overlap it is as it is.
    """
    if not overlap:
        return trainer
    can = trainer.resolve().can
    is_hidden = {
        **dict.fromkeys(_DATA_RULES, overlap != "none"),
        **dict.fromkeys(_OTHER_RULES, overlap == "all"),
    }
    rules = {
        name: "true" if hidden else "false"
        for name, hidden in is_hidden.items()
        if can.is_switchable(name)
    }
    return replace(trainer, rules={**trainer.rules, **rules})


def _describe(values: dict[str, int], dp: int, source: StrategySource) -> str:
    """Return the degrees, and of all else what is not the plain case or is varied."""
    wp, recompute = values["weight_parallel"], values["recompute"]
    degree = values["weight_degree"] if wp == _ISP else ""
    shards = f"/{values['shard_degree']}" if values["shard_degree"] else ""
    schedule = source.pipeline_schedules[values["pipeline_schedule"]]
    parts = (
        (source.devices[values["device"]], "device" in source.varied),
        (f"{values['num_devices']} devices", "num_devices" in source.varied),
        (f"tp{values['tp']} pp{values['pp']}", True),
        (f"vpp{values['virtual_stages']}", values["virtual_stages"] > 1),
        # Of a layout that does not divide the devices no replica is left.
        (f"dp{dp}", dp > 0),
        (f"cp{values['cp']}", values["cp"] > 1),
        (f"ep{values['ep']}", values["ep"] > 1),
        (f"mbs{values['micro_batch_size']}", True),
        (f"gbs{values['global_batch_size']}", "global_batch_size" in source.varied),
        ("sp", values["sequence_parallel"]),
        (f"zero{values['zero_stage']}{shards}", values["zero_stage"]),
        (f"{WEIGHT_PARALLELS[wp]}{degree}", wp),
        (f"recompute-{RECOMPUTE_MODES[recompute]}", recompute != _NONE),
        (f"overlap-{source.overlaps[values['overlap']]}", values["overlap"]),
        (schedule, "pipeline_schedule" in source.varied),
    )
    return " ".join(text for text, is_told in parts if is_told)
