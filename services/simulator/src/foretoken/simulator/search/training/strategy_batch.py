"""Strategies on one kind of device, cut, priced and put together to steps.

Putting steps together takes as long as timing passes, so it is done for the prices and the
strategies that are needed: of most the estimate alone.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.rank import even_layers
from foretoken.simulator.search.training.chunk_kinds import ChunkCut, cut_model
from foretoken.simulator.search.training.device_work import DeviceWork, TimedPasses, list_buckets
from foretoken.simulator.search.training.shape_library import ShapeGroups
from foretoken.simulator.search.training.state_calls import Calls, ChunkStates
from foretoken.simulator.search.training.transfer_calls import at_stride
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.chunk_placement import ChunkPlaces
from foretoken.simulator.steps.composition import (
    STAYS,
    RankTotals,
    Sends,
    StepColumns,
    StepParts,
    compose_steps,
)
from foretoken.simulator.steps.pipelines.schedule import PipelineSchedule, find_schedule
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.step_end import host_gap_us
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.training.efficiency import count_step_flops, peak_flops_per_s

# Entries of a column that are put together at once: those of that length stay in the cache.
_SLICE = 24576


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _CutGroup:
    """Rows of strategies of one schedule that cut the model alike."""

    rows: Ints
    schedule: PipelineSchedule
    cut: ChunkCut


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _WrittenGroup:
    """A group with what ends its steps; `key` finds the states of a strategy.

    `states` are by kind of chunk, the calls of ranks by the kinds of their chunks.
    """

    group: _CutGroup
    key: Ints
    states: tuple[ChunkStates, ...]
    checks: dict[tuple[int, ...], tuple[Calls, ...]]
    updates: dict[tuple[int, ...], tuple[Calls, ...]]
    agreement: Ints
    is_across: Flags


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedBatch:
    """Strategies with the passes of their chunks, and the prices of what ends their steps."""

    work: DeviceWork
    groups: Sequence[_WrittenGroup]
    passes: TimedPasses
    prices_us: Floats
    model_version: str

    @property
    def step_s_at_peak(self) -> Floats:
        """Time of a step whose devices do nothing but what the model needs, of each strategy."""
        rows = self.work.strategies
        first, number = number_rows([rows.num_devices, rows.global_batch_size])
        times = []
        for row in first:
            # The work of the model does not depend on how it is laid out.
            scenario = self.work.scenario_of(row)
            times.append(count_step_flops(scenario) / peak_flops_per_s(scenario))
        return np.array(times)[number]

    def mfu_ratio(self, step_us: Floats) -> Floats:
        """Return the share of the devices' peak that steps of all strategies reach."""
        return np.asarray(self.step_s_at_peak / (step_us / US_PER_S))

    def time(self, rows: Ints | None = None, variants: Sequence[int] | None = None) -> StepColumns:
        """Return the steps of some strategies, each once, by some of the prices; all by default."""
        if variants is not None:
            return self._with_variants(list(variants)).time(rows)
        length = len(self.work.strategies)
        rows = np.arange(length) if rows is None else rows
        place = np.full(length, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        step_us = np.zeros((len(self.prices_us), len(rows)))
        busy, exposed_us = np.zeros(len(rows)), np.zeros(len(rows))
        factor = (self.work.strategies.base.calibration or TrainingCalibration()).step_factor
        for written in self.groups:
            own = written.group.rows
            some = np.flatnonzero(place[own] >= 0)
            for chosen, found in self._compose(written, some) if len(some) else ():
                at = place[own[chosen]]
                step_us[:, at] = found.step_us * factor
                busy[at] = found.busy_ratio
                exposed_us[at] = found.exposed_us * factor
        return StepColumns(step_us=step_us, busy_ratio=busy, exposed_us=exposed_us)

    def _with_variants(self, variants: list[int]) -> "PricedBatch":
        passes = self.passes.with_variants(variants)
        return dataclasses.replace(self, passes=passes, prices_us=self.prices_us[variants])

    def _compose(self, written: _WrittenGroup, some: Ints) -> Iterator[tuple[Ints, StepColumns]]:
        """Yield steps of a group, those of `some` of its places, with these, a slice at a time."""
        totals = {
            kinds: self._total(written, kinds)
            for kinds in dict.fromkeys(written.group.cut.rank_kinds)
        }
        length = _SLICE // len(self.prices_us)
        for start in range(0, len(some), length):
            chosen = some[start : start + length]
            yield chosen, compose_steps(self._parts(written, chosen, totals))

    def _total(self, written: _WrittenGroup, kinds: tuple[int, ...]) -> Floats:
        """Return what ends the steps of ranks in µs, (figure of `RankTotals`, variant, key)."""
        states = [written.states[kind] for kind in kinds]
        none = np.zeros((len(self.prices_us), len(states[0].num_updated)))
        figures = [
            [calls for chunk in states for calls in chunk.reduction],
            [calls for chunk in states for calls in chunk.buckets],
            [calls for chunk in states for calls in chunk.kernels],
            written.checks[kinds],
            written.updates[kinds],
            [calls for chunk in states for calls in chunk.gather],
        ]
        return np.stack(
            [sum((calls.total_us(self.prices_us) for calls in own), none) for own in figures]
        )

    def _parts(
        self, written: _WrittenGroup, some: Ints, totals: dict[tuple[int, ...], Floats]
    ) -> StepParts:
        work, group, key = self.work, written.group, written.key[some]
        rows, cut = group.rows[some], group.cut
        hides, is_split = work.hides[rows], group.schedule.splits_backward
        passes = [
            self.passes.of_chunk(
                kind, rows, list_buckets(own.buckets, key, hides, self.prices_us), is_split=is_split
            )
            for kind, own in zip(cut.kinds, written.states, strict=True)
        ]
        agreement_us = self.prices_us[:, written.agreement[:, some]].sum(axis=1)
        ends = {}
        for kinds, table in totals.items():
            reduction, buckets, kernels, check, update, gather = np.take(table, key, axis=2)
            ends[kinds] = RankTotals(
                reduction_us=reduction,
                buckets_us=buckets,
                kernels_us=kernels,
                check_us=check + agreement_us,
                update_us=update,
                gather_us=gather,
            )
        trainer = work.trainers[0]
        return StepParts(
            schedule=group.schedule.name,
            chunks_of_rank=cut.places.chunks_of_rank,
            is_mirrored=cut.places.is_mirrored,
            is_mixed=False,
            num_micro_batches=work.strategies.num_micro_batches[rows],
            passes=[passes[kind] for kind in cut.kind_of_chunk],
            sends=self._sends(written, some),
            totals=[ends[kinds] for kinds in cut.rank_kinds],
            hides=hides,
            gathers_early=work.gathers_early[rows],
            trainer=trainer,
            step_gap_us=host_gap_us(trainer, work.strategies.base.calibration),
        )

    def _sends(self, written: _WrittenGroup, some: Ints) -> list[Sends]:
        """Return what the outputs of chunks take, one object for those that go the same ways."""
        ahead, back = self.work.transfers.time(written.group.rows[some], self.prices_us)
        known: dict[bytes, Sends] = {}
        found = []
        for chunk, is_across in enumerate(written.is_across[:, some]):
            way = is_across.tobytes()
            if chunk not in written.group.cut.places.peers:
                found.append(STAYS)
                continue
            if way not in known:
                near, far = ((side[0], side[1]) for side in (ahead, back))
                known[way] = (
                    np.where(is_across, near[1], near[0]),
                    np.where(is_across, far[1], far[0]),
                )
            found.append(known[way])
        return found


def price_strategies(
    strategies: Strategies, groups: ShapeGroups, book: CallBook, predictor: LatencySource
) -> PricedBatch:
    """Ask what all calls of strategies on one kind of device cost, and time their passes."""
    cuts = list(_cut(strategies))
    is_copied = np.zeros(len(strategies), dtype=np.bool_)
    for group in cuts:
        is_copied[group.rows] = (
            strategies.base.model.has_tied_embedding and not group.cut.places.is_folded
        )
    work = DeviceWork(strategies, groups, is_copied, book)
    written = [_write(work, group, book) for group in cuts]
    book.fetch(work.scenario_of(0), predictor)
    is_split = any(group.schedule.splits_backward for group in cuts)
    kinds = [kind for group in cuts for kind in group.cut.kinds]
    return PricedBatch(
        work=work,
        groups=written,
        passes=work.time_passes(kinds, is_split=is_split),
        prices_us=book.prices_us,
        model_version=book.model_version,
    )


def _cut(strategies: Strategies) -> Iterator[_CutGroup]:
    """Yield the strategies that cut the model alike."""
    model, chunks = strategies.base.model, strategies.chunks
    first, number = number_rows([strategies.pipeline_schedule, strategies.pp, chunks])
    counts = strategies.num_micro_batches
    for at, row in enumerate(first.tolist()):
        rows, pp = np.flatnonzero(number == at), int(strategies.pp[row])
        name = strategies.source.pipeline_schedules[strategies.pipeline_schedule[row]]
        schedule, num_chunks = find_schedule(name), int(chunks[row])
        # Where chunks are does not depend on how many micro batches there are.
        places = ChunkPlaces.of_schedule(schedule, pp, int(counts[rows].min()), num_chunks)
        layers = even_layers(model.num_layers, pp * num_chunks)
        yield _CutGroup(rows=rows, schedule=schedule, cut=cut_model(model, layers, places))


def _write(work: DeviceWork, group: _CutGroup, book: CallBook) -> _WrittenGroup:
    """Write what ends the steps of strategies that cut the model alike."""
    strategies, rows, cut = work.strategies, group.rows, group.cut
    own = strategies.take(rows)
    keys = [work.weights[rows], own.tp, own.cp, own.dp, own.ep, own.state_stage, own.shards]
    keys += [work.hides[rows].astype(np.int64), own.is_isp.astype(np.int64), own.weight_parts]
    first, key = number_rows(keys)
    writer = work.write_states(rows[first], book)
    last = len(cut.places.chunks_of_rank) - 1
    over_ends = partial(PlacedGroup.of_stages, 0, last)
    table = None if cut.places.is_folded else over_ends
    # Which two ranks hold a chunk does not matter to the time but for their nodes.
    mirror = over_ends if cut.places.is_mirrored else None
    states = tuple(writer.write_chunk(kind, table, mirror) for kind in cut.kinds)
    checks, updates = {}, {}
    for kinds in dict.fromkeys(cut.rank_kinds):
        num_updated = np.sum([states[kind].num_updated for kind in kinds], axis=0)
        checks[kinds], updates[kinds] = writer.write_updates(num_updated)
    return _WrittenGroup(
        group=group,
        key=key,
        states=states,
        checks=checks,
        updates=updates,
        agreement=work.write_agreements(rows, book),
        is_across=_find_across(work, group),
    )


def _find_across(work: DeviceWork, group: _CutGroup) -> Flags:
    """Tell of the output of every chunk whether it goes to another node: [chunk, strategy]."""
    rank, places = work.groups.shapes[0].rank, group.cut.places
    strides, of_stride = np.unique(work.strategies.stage_ranks[group.rows], return_inverse=True)
    table = np.zeros((len(group.cut.kind_of_chunk), len(strides)), dtype=np.bool_)
    for chunk, pairs in places.peers.items():
        for at, stride in enumerate(strides.tolist()):
            apart = at_stride(rank, stride)
            groups = [PlacedGroup.of_stages(*pair, apart) for pair in pairs]
            table[chunk, at] = any(pair.dims["num_nodes"] > 1 for pair in groups)
    return table[:, of_stride]
