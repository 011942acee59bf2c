"""What the fullest device of every strategy holds, in closed form.

It is what `measure_memory` says of the scenario of each strategy: states by the parameters of a
rank's chunks, and activations by the moments at which its order of passes holds most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory_headroom import TRAINING_AXES, training_headroom_bytes
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.memory_places import (
    MicroBatchGroups,
    group_shapes,
)
from foretoken.simulator.search.training.memory_ranks import PipelineCut, cut_pipeline
from foretoken.simulator.search.training.memory_states import ParameterColumns
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.sharding import Sharding
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.training.memory.in_flight import FullMoments, find_moments, hold_most
from foretoken.simulator.training.memory.state_bytes import StateBytes, StateRules
from foretoken.simulator.training.schedule import find_schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyMemory:
    """Bytes of the fullest device of every strategy, and what that has left."""

    reserved_bytes: Floats
    margin_bytes: Floats

    @property
    def fits(self) -> Flags:
        """Which strategies have the memory."""
        return np.asarray(self.margin_bytes >= 0, dtype=np.bool_)


def measure_strategies(
    strategies: Strategies, shapes: ShapeLibrary | None = None
) -> StrategyMemory:
    """Return what strategies hold that can run; `shapes` are those lowered so far.

    Raises:
        InvalidRequestError: a layout does not fit the model.

    """
    if not len(strategies):
        return StrategyMemory(reserved_bytes=np.zeros(0), margin_bytes=np.zeros(0))
    rows, number = number_rows(_keys(strategies))
    reserved = _Meter(strategies.take(rows), shapes or ShapeLibrary()).measure()[number]
    return StrategyMemory(reserved_bytes=reserved, margin_bytes=_find_room(strategies) - reserved)


def _find_room(strategies: Strategies) -> Floats:
    """Return what the allocator of each strategy can have of its device."""
    trainer = strategies.source.scenario.trainer.resolve()
    degrees = [getattr(strategies, axis) for axis in TRAINING_AXES]
    rooms = [
        device.memory_bytes - training_headroom_bytes(device, trainer, degrees)
        for device in map(find_device, strategies.source.devices)
    ]
    wide = np.stack([np.broadcast_to(room, len(strategies)) for room in rooms])
    found: Floats = wide[strategies.device, np.arange(len(strategies))].astype(np.float64)
    return found


def _keys(strategies: Strategies) -> list[Ints]:
    """Return what memory depends on: devices and what hides behind what are not in it."""
    return [
        *(strategies.pipeline_schedule, strategies.pp, strategies.virtual_stages),
        *(strategies.num_micro_batches, strategies.tp, strategies.cp, strategies.ep),
        strategies.sequence_parallel * (strategies.tp > 1),
        *(strategies.weight_parallel, strategies.weight_degree, strategies.micro_batch_size),
        *(strategies.recompute, strategies.dp, strategies.zero_stage, strategies.shard_degree),
    ]


class _Meter:
    """Measures strategies, all of one pipeline at a time."""

    def __init__(self, strategies: Strategies, library: ShapeLibrary) -> None:
        scenario = strategies.source.scenario
        self._strategies = strategies
        self._rules = StateRules.of_scenario(scenario)
        self._shapes = group_shapes(strategies, library)
        self._groups = MicroBatchGroups(strategies, self._shapes)
        self._parameters = ParameterColumns(strategies, self._shapes, self._rules)
        groups = strategies.dense.shards, strategies.expert.shards, strategies.weight_parts
        self._shards = np.stack(groups)
        self._zero_stage = strategies.state_stage

    def measure(self) -> Floats:
        """Return what the fullest rank of each strategy takes from its device."""
        trainer = self._rules.trainer
        allocated = np.zeros(len(self._strategies))
        for rows, moments in self._pipelines():
            cut = cut_pipeline(moments, self._shapes.kinds)
            peaks, of_row = self._find_peaks(rows, cut)
            stages, of_stage = np.unique(self._zero_stage[rows], return_inverse=True)
            for index, stage in enumerate(stages.tolist()):
                chosen = np.flatnonzero(of_stage == index)
                passing = peaks[of_row[chosen]]
                allocated[rows[chosen]] = self._fullest(rows[chosen], stage, cut, passing)
        return allocated * trainer.reserved_ratio

    def _pipelines(self) -> Iterator[tuple[Ints, tuple[FullMoments, ...]]]:
        """Yield strategies whose ranks hold as many micro batches, with the ranks' moments."""
        strategies = self._strategies
        found: dict[int, tuple[tuple[FullMoments, ...], list[Ints]]] = {}
        names = strategies.source.pipeline_schedules
        first, number = number_rows(
            [
                *(strategies.pipeline_schedule, strategies.pp, strategies.virtual_stages),
                strategies.num_micro_batches,
            ]
        )
        order = np.argsort(number, kind="stable")
        bounds = np.searchsorted(number[order], np.arange(len(first) + 1))
        for index, row in enumerate(first.tolist()):
            moments = find_moments(
                find_schedule(names[int(strategies.pipeline_schedule[row])]),
                *(int(strategies.pp[row]), int(strategies.num_micro_batches[row])),
                int(strategies.virtual_stages[row]),
            )
            rows = order[bounds[index] : bounds[index + 1]]
            found.setdefault(id(moments), (moments, []))[1].append(rows)
        for moments, parts in found.values():
            yield np.concatenate(parts), moments

    def _find_peaks(self, rows: Ints, cut: PipelineCut) -> tuple[Floats, Ints]:
        """Return the most that passes hold, [groups, kinds of ranks], and the group of each row."""
        groups, of_row = np.unique(self._groups.of_strategy[rows], return_inverse=True)
        needs = self._groups.cut(cut.layers, is_shared=cut.is_shared)
        columns = [
            getattr(needs, name)[groups] for name in ("saved", "weight_half", "forward", "backward")
        ]
        needed = np.stack(columns, axis=1)
        peaks = [hold_most(rank.counts, needed[:, :, rank.of_counts]) for rank in cut.ranks]
        return np.stack(peaks, axis=1), of_row

    def _fullest(self, rows: Ints, stage: int, cut: PipelineCut, passing: Floats) -> Floats:
        """Return what tensors occupy on the fullest rank, at its fullest moment."""
        numbers = self._parameters.of_strategy[rows]
        shards = self._shards[:, rows]
        first, number = number_rows([numbers, *shards])
        chosen = rows[first]
        is_piped = bool(self._strategies.pp[chosen[0]] > 1)
        states = self._parameters.count_states(
            cut, numbers[first], shards[:, first], self._rules_of(stage, is_piped=is_piped)
        )
        kept, gathered, update = (
            np.broadcast_to(part, states.kept.shape)[number]
            for part in (states.kept, states.gathered, states.update)
        )
        of_rank = StateBytes(weights=kept, gathered=gathered, update=update)
        fullest: Floats = of_rank.at_most(passing).max(axis=1)
        return fullest

    def _rules_of(self, stage: int, *, is_piped: bool) -> StateRules:
        sharding = Sharding.of_stage(stage)
        is_once = sharding.parameters and self._rules.trainer.trains_master_weights
        return replace(self._rules, sharding=sharding, is_once=is_once and is_piped)
