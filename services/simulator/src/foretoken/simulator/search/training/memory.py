"""What the fullest device of every strategy holds, in closed form.

States are those of a rank's chunks, and activations those of the moments at which its order of
passes holds most. Strategies that hold the same are measured once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory import TRAINING_AXES, training_headroom_bytes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.rank import even_layers
from foretoken.simulator.search.training.shape_library import Shape, ShapeLibrary
from foretoken.simulator.steps.held.in_flight import (
    FullMoments,
    MergedMoments,
    find_moments,
    hold_most,
    merge_ranks,
)
from foretoken.simulator.steps.held.pass_peak import PlaceColumns
from foretoken.simulator.steps.memory import (
    ActivationMeter,
    HeldChunks,
    StateMeter,
    WholeModel,
    state_rules,
)
from foretoken.simulator.steps.parameters import number_layer_kinds
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.strategies import Strategies


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
        self._strategies, self._base = strategies, strategies.source.scenario
        shapes, of_shape = library.group_layers(strategies)
        self._kinds = number_layer_kinds(shapes[0].forward, self._base.model.num_layers)
        self._needs, self._needs_of = self._measure_needs(shapes, of_shape)
        first, self._weights_of = number_rows(
            [strategies.tp, strategies.ep, strategies.weight_parallel, strategies.weight_degree]
        )
        degrees = strategies.weight_parts[first].tolist()
        self._states = StateMeter(
            [
                self._model(shapes[shape], 0).weights(degree)
                for shape, degree in zip(of_shape[first].tolist(), degrees, strict=True)
            ]
        )
        shards = strategies.dense.shards, strategies.expert.shards, strategies.weight_parts
        self._sharding = [*shards, strategies.state_stage]

    def measure(self) -> Floats:
        """Return what the fullest rank of each strategy takes from its device."""
        allocated = np.zeros(len(self._strategies))
        for rows, moments in self._pipelines():
            allocated[rows] = self._fullest(rows, moments)
        return allocated * self._base.trainer.resolve().reserved_ratio

    def _model(self, shape: Shape, index: int) -> WholeModel:
        """Return the operators of a shape with one of its micro batch sizes."""
        size = int(shape.micro_batch_sizes[index])
        return WholeModel(
            forward=shape.forward_of(index),
            rank=shape.rank,
            scenario=replace(shape.scenario, micro_batch_size=size),
            kinds=self._kinds,
        )

    def _measure_needs(
        self, shapes: tuple[Shape, ...], of_shape: Ints
    ) -> tuple[PlaceColumns, Ints]:
        """Return what micro batches need, by group of strategies, and the group of each."""
        strategies, in_some = self._strategies, self._base.recompute_layers > 0
        sizes = strategies.micro_batch_size
        first, number = number_rows([of_shape, sizes, strategies.recompute])
        meters: dict[tuple[int, int], ActivationMeter] = {}
        modes: dict[int, TrainingScenario] = {}
        needs, streams = [], []
        for row in first.tolist():
            key, mode = (int(of_shape[row]), int(sizes[row])), int(strategies.recompute[row])
            if key not in meters:
                shape = shapes[key[0]]
                index = int(np.searchsorted(shape.micro_batch_sizes, key[1]))
                meters[key] = ActivationMeter(self._model(shape, index))
            if mode not in modes:
                modes[mode] = strategies.scenario(row)
            needs.append(meters[key].measure(modes[mode], in_some=in_some))
            streams.append(meters[key].stream_bytes)
        return PlaceColumns.of_needs(needs, streams), number

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

    def _fullest(self, rows: Ints, moments: tuple[FullMoments, ...]) -> Floats:
        """Return what tensors occupy on the fullest rank, at its fullest moment."""
        chunks, merged = _cut_evenly(moments, self._kinds, self._base.recompute_layers)
        groups, group = np.unique(self._needs_of[rows], return_inverse=True)
        needs = chunks.cut_needs(self._needs.of_cases(groups)).counted
        peaks = [hold_most(rank.counts, needs[:, :, rank.of_counts]) for rank in merged]
        weights = self._weights_of[rows]
        first, number = number_rows([weights, *(column[rows] for column in self._sharding)])
        degrees = self._strategies.take(rows[first])
        states = self._states.measure(chunks, weights[first], degrees, state_rules(degrees))
        passing = np.stack(peaks, axis=1)[group]
        fullest: Floats = states.take(number).at_most(passing).max(axis=1)
        return fullest


@lru_cache(maxsize=1024)
def _cut_evenly(
    moments: tuple[FullMoments, ...], kinds: tuple[int, ...], num_recomputed: int
) -> tuple[HeldChunks, Sequence[MergedMoments]]:
    """Return chunks of layers of these kinds, held by one of each kind of rank, and its moments."""
    last = max(chunk for rank in moments for chunk in rank.chunks)
    chunks = HeldChunks(
        layers=even_layers(len(kinds), last + 1),
        ranks=np.array([rank.chunks for rank in moments]),
        kinds=kinds,
        num_kinds=max(kinds) + 1,
        num_recomputed=num_recomputed,
    )
    merged = merge_ranks(moments, chunks.kinds_of_chunks)
    return replace(chunks, ranks=np.array([rank.chunks for rank in merged])), merged
