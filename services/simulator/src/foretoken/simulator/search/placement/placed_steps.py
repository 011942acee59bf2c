"""Steps of strategies of a mixed cluster: each stage with the prices of its kind of node.

What a chunk runs and exchanges is that of a search over equal devices; the rule that puts them
together is `steps/composition.py`, of which placements are the cases.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.placed_work import PlacedWork, join_columns
from foretoken.simulator.search.training.chunk_kinds import ChunkCut, ChunkKind, cut_model
from foretoken.simulator.search.training.device_work import TimedPasses, list_buckets
from foretoken.simulator.search.training.state_calls import Calls, ChunkStates
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.chunk_placement import ChunkPlaces
from foretoken.simulator.steps.chunks import Buckets, ChunkPasses
from foretoken.simulator.steps.composition import (
    STAYS,
    RankTotals,
    StepColumns,
    StepParts,
    compose_steps,
)
from foretoken.simulator.steps.passes import PassTime
from foretoken.simulator.steps.pipelines.schedule import PipelineSchedule, find_schedule
from foretoken.simulator.steps.step_end import host_gap_us

_WAITED = ("", "")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ChunkPart:
    """A chunk of some cases that is of one kind, on one kind of node; `at` finds the cases."""

    at: Ints
    node: int
    kind: ChunkKind
    states: ChunkStates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RankPart:
    """A rank of some cases on one kind of node; `agreement` is [call, case]."""

    at: Ints
    node: int
    checks: Sequence[Calls]
    updates: Sequence[Calls]
    agreement: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """Strategies of one schedule with as many stages, chunks and micro batches."""

    rows: Ints
    schedule: PipelineSchedule
    places: ChunkPlaces
    chunks: Sequence[Sequence[_ChunkPart]]
    ranks: Sequence[Sequence[_RankPart]]


class _Writer:
    """Writes what ends the steps of strategies whose layers are cut."""

    def __init__(self, work: PlacedWork, cuts: Sequence[tuple[int, ...]]) -> None:
        self._work, self._cuts = work, cuts
        self.books = {kind: work.open_book(kind) for kind in work.kinds}

    def write(self, rows: Sequence[int]) -> list[_Group]:
        """Write all strategies and ask what their calls cost."""
        alike: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
        for row in rows:
            point = self._work.points[row]
            stages, count = len(point.pipeline.stages), point.num_micro_batches
            alike[point.schedule, stages, count, point.virtual_stages].append(row)
        groups = [self._write(np.array(own), *key) for key, own in alike.items()]
        for kind, book in self.books.items():
            self._work.fetch(kind, book)
        return groups

    def _write(
        self, rows: Ints, schedule: str, num_stages: int, num_micro_batches: int, rounds: int
    ) -> _Group:
        plug_in = find_schedule(schedule)
        # One round of micro batches goes where all go.
        count = min(num_micro_batches, num_stages)
        places = ChunkPlaces.of_schedule(plug_in, num_stages, count, rounds)
        model = self._work.space.scenario.model
        cut = cache(partial(cut_model, model, places=places))
        cuts = [cut(self._cuts[row]) for row in rows.tolist()]
        stages = self._work.stages(rows)
        chunks = [
            list(self._write_chunk(chunk, rows, stages, cuts))
            for chunk in range(len(cuts[0].kind_of_chunk))
        ]
        ranks = [
            list(self._write_rank(rows, stages[:, rank], [chunks[chunk] for chunk in held]))
            for rank, held in enumerate(places.chunks_of_rank)
        ]
        return _Group(rows=rows, schedule=plug_in, places=places, chunks=chunks, ranks=ranks)

    def _write_chunk(
        self, chunk: int, rows: Ints, stages: Ints, cuts: Sequence[ChunkCut]
    ) -> Iterator[_ChunkPart]:
        places, last = cuts[0].places, stages.shape[1] - 1
        nodes = stages[:, chunk % (last + 1)]
        # Ends of a pipeline over several kinds of nodes are on different ones.
        is_one = (stages == stages[:, :1]).all(axis=1)
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        kinds: dict[tuple[int, ...], ChunkKind] = {}
        for case, cut in enumerate(cuts):
            kind = cut.kinds[cut.kind_of_chunk[chunk]]
            kinds.setdefault(kind.pass_key, kind)
            alike[int(nodes[case]), kind.pass_key, bool(is_one[case])].append(case)
        for (node, key, is_alone), cases in alike.items():
            at = np.array(cases)
            pair = (
                partial(PlacedGroup.of_stages, 0, last)
                if is_alone
                else partial(PlacedGroup.of_nodes, "pp")
            )
            own = self._work.row_in[node, rows[at]]
            writer = self._work.kinds[node].device.write_states(own, self.books[node])
            states = writer.write_chunk(kinds[key], None if places.is_folded else pair, None)
            yield _ChunkPart(at=at, node=node, kind=kinds[key], states=states)

    def _write_rank(
        self, rows: Ints, nodes: Ints, chunks: Sequence[Sequence[_ChunkPart]]
    ) -> Iterator[_RankPart]:
        num_updated = np.zeros(len(rows), dtype=np.int64)
        for parts in chunks:
            for part in parts:
                num_updated[part.at] += part.states.num_updated
        for node in np.unique(nodes).tolist():
            at = np.flatnonzero(nodes == node)
            own, device = self._work.row_in[node, rows[at]], self._work.kinds[node].device
            writer = device.write_states(own, self.books[node])
            checks, updates = writer.write_updates(num_updated[at])
            agreement = device.write_agreements(own, self.books[node])
            yield _RankPart(at=at, node=node, checks=checks, updates=updates, agreement=agreement)


def time_placed(
    work: PlacedWork, rows: Sequence[int], cuts: Sequence[tuple[int, ...]]
) -> StepColumns:
    """Return the steps of some strategies, in µs, given the layers of the chunks of all."""
    writer = _Writer(work, cuts)
    groups = writer.write(rows)
    passes = {kind: _time_passes(work, kind, groups) for kind in work.kinds}
    place = {row: at for at, row in enumerate(rows)}
    num_variants = max(book.num_variants for book in writer.books.values())
    step_us, ratios = np.zeros((num_variants, len(rows))), np.zeros((2, len(rows)))
    factor = (work.space.scenario.calibration or TrainingCalibration()).step_factor
    for group in groups:
        at = [place[row] for row in group.rows.tolist()]
        found = compose_steps(_Composer(work, group, passes, writer.books).parts())
        step_us[:, at] = found.step_us * factor
        ratios[:, at] = found.busy_ratio, found.exposed_us * factor
    return StepColumns(step_us=step_us, busy_ratio=ratios[0], exposed_us=ratios[1])


def _time_passes(work: PlacedWork, node: int, groups: Sequence[_Group]) -> TimedPasses:
    """Return the passes of all kinds of chunks that are on a kind of node."""
    kinds = {
        part.kind.pass_key: part.kind
        for group in groups
        for parts in group.chunks
        for part in parts
        if part.node == node
    }
    return work.kinds[node].time_passes(list(kinds.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _Composer:
    """Gathers what a group's steps are made of from the kinds of nodes of its stages."""

    work: PlacedWork
    group: _Group
    passes: dict[int, TimedPasses]
    books: dict[int, CallBook]

    def parts(self) -> StepParts:
        """Return what steps are made of."""
        work, group = self.work, self.group
        trainer = work.space.scenario.trainer.resolve()
        num_stages = len(group.ranks)
        ahead, back = work.sends(group.rows)
        count = work.points[int(group.rows[0])].num_micro_batches
        return StepParts(
            schedule=group.schedule.name,
            chunks_of_rank=group.places.chunks_of_rank,
            is_mirrored=False,
            is_mixed=True,
            num_micro_batches=np.full(len(group.rows), count),
            passes=[self._chunk(parts) for parts in group.chunks],
            sends=[
                (ahead[chunk % num_stages], back[chunk % num_stages])
                if chunk in group.places.peers
                else STAYS
                for chunk in range(len(group.chunks))
            ],
            totals=[self._rank(rank) for rank in range(num_stages)],
            hides=trainer.overlaps_gradient_reduction & ~work.strategies.is_once[group.rows],
            gathers_early=np.full(len(group.rows), trainer.overlaps_parameter_gather),
            trainer=trainer,
            step_gap_us=host_gap_us(trainer, work.space.scenario.calibration),
        )

    def _rank(self, rank: int) -> RankTotals:
        chunks = [
            part
            for held in self.group.places.chunks_of_rank[rank]
            for part in self.group.chunks[held]
        ]
        ranks = self.group.ranks[rank]
        prices = {node: book.prices_us for node, book in self.books.items()}

        def total(parts: Sequence[Any], read: Callable[[Any], Sequence[Calls]]) -> Floats:
            found = np.zeros((len(prices[parts[0].node]), len(self.group.rows)))
            for part in parts:
                for calls in read(part):
                    found[:, part.at] += calls.total_us(prices[part.node])
            return found

        check_us = total(ranks, lambda part: part.checks)
        for part in ranks:
            check_us[:, part.at] += prices[part.node][:, part.agreement].sum(axis=1)
        return RankTotals(
            reduction_us=total(chunks, lambda part: part.states.reduction),
            buckets_us=total(chunks, lambda part: part.states.buckets),
            kernels_us=total(chunks, lambda part: part.states.kernels),
            check_us=check_us,
            update_us=total(ranks, lambda part: part.updates),
            gather_us=total(chunks, lambda part: part.states.gather),
        )

    def _chunk(self, parts: Sequence[_ChunkPart]) -> ChunkPasses:
        """Return the passes of a chunk of all cases."""
        found = []
        for part in parts:
            rows = self.work.row_in[part.node, self.group.rows[part.at]]
            hides = self.work.kinds[part.node].device.hides[rows]
            every = np.arange(len(part.at))
            buckets = list_buckets(
                part.states.buckets, every, hides, self.books[part.node].prices_us
            )
            is_split = self.group.schedule.splits_backward
            timed = self.passes[part.node].of_chunk(part.kind, rows, buckets, is_split=is_split)
            found.append((part.at, timed))
        return _join_passes(found, len(self.group.rows))


def _join_passes(parts: Sequence[tuple[Ints, ChunkPasses]], length: int) -> ChunkPasses:
    """Return passes of some cases each as those of all."""
    if len(parts) == 1:
        return parts[0][1]
    first = parts[0][1]

    def join(read: Callable[[ChunkPasses], Floats]) -> Floats:
        return join_columns([(at, read(own)) for at, own in parts], length)

    def join_pass(name: str) -> PassTime | None:
        if getattr(first, name) is None:
            return None
        columns = {
            field: join(attrgetter(f"{name}.{field}"))
            for field in ("total_us", "compute_us", "hidden_us", "left_us")
        }
        waited_us = join(attrgetter(f"{name}.all_exposed_us"))
        return PassTime(**columns, exposed_us={_WAITED: waited_us})

    def join_buckets(number: int) -> Buckets:
        own = [(at, passes.buckets[number:]) for at, passes in parts]
        return Buckets(
            join_columns([(at, some[0].time_us) for at, some in own if some], length),
            join_columns([(at, some[0].count) for at, some in own if some], length),
        )

    forward, backward = join_pass("forward"), join_pass("backward")
    if forward is None or backward is None:
        raise ValueError("a chunk has both passes")
    return ChunkPasses(
        forward=forward,
        backward=backward,
        backward_input=join_pass("backward_input"),
        backward_weight=join_pass("backward_weight"),
        not_accumulated_us=join(lambda own: own.not_accumulated_us),
        buckets=[join_buckets(at) for at in range(max(len(own.buckets) for _, own in parts))],
        slowdown_ratio=first.slowdown_ratio,
    )
