"""Steps of strategies whose calls are priced and whose passes are timed, as many as are wanted.

Putting steps together takes as long as timing passes, so it is done for the prices and the
strategies that are needed: of most the estimate alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkCut
from foretoken.simulator.search.training.pass_timer import PassColumns
from foretoken.simulator.search.training.state_columns import ChunkStates
from foretoken.simulator.search.training.step_columns import (
    RankEnds,
    RankStates,
    StepColumns,
    StepInputs,
    compose_steps,
)
from foretoken.simulator.search.training.transfer_columns import Transfers
from foretoken.simulator.steps.chunks import Buckets, ChunkPasses
from foretoken.simulator.training.schedule import find_schedule

# Entries of a column that are put together at once: those of that length stay in the cache.
_SLICE = 24576


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WrittenGroup:
    """Strategies of one schedule that cut the model alike, with what was written of them."""

    rows: Ints
    schedule: str
    cut: ChunkCut
    key: Ints
    states: tuple[ChunkStates, ...]
    rank_states: dict[tuple[int, ...], RankStates]
    agreement: Ints
    transfers: Transfers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedPiece:
    """Strategies with the passes of their chunks, and the prices of what ends their steps.

    `num_micro_batches`, `hides` and `gathers_early` have one entry per strategy; see `StepInputs`.
    """

    groups: Sequence[WrittenGroup]
    passes: Mapping[str, PassColumns]
    prices_us: Floats
    num_micro_batches: Ints
    hides: Flags
    gathers_early: Flags
    trainer: TrainerProfile
    calibration: TrainingCalibration

    def time(self, rows: Ints | None = None, variants: Sequence[int] | None = None) -> StepColumns:
        """Return the steps of some strategies, each once, by some of the prices; all by default."""
        if variants is not None:
            return self._with_variants(list(variants)).time(rows)
        length = len(self.hides)
        rows = np.arange(length) if rows is None else rows
        place = np.full(length, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        step_us = np.zeros((len(self.prices_us), len(rows)))
        busy, exposed_us = np.zeros(len(rows)), np.zeros(len(rows))
        factor = self.calibration.step_factor
        for group in self.groups:
            some = np.flatnonzero(place[group.rows] >= 0)
            for chosen, found in self._compose(group, some) if len(some) else ():
                at = place[group.rows[chosen]]
                step_us[:, at] = found.step_us * factor
                busy[at] = found.busy_ratio
                exposed_us[at] = found.exposed_us * factor
        return StepColumns(step_us=step_us, busy_ratio=busy, exposed_us=exposed_us)

    def _with_variants(self, variants: Sequence[int]) -> "PricedPiece":
        passes = {name: found.with_variants(variants) for name, found in self.passes.items()}
        return dataclasses.replace(self, passes=passes, prices_us=self.prices_us[variants])

    def _compose(self, group: WrittenGroup, some: Ints) -> Iterator[tuple[Ints, StepColumns]]:
        """Yield steps of a group, those of `some` of its places, with these, a slice at a time."""
        ends = {
            kinds: RankEnds.of_calls([group.states[kind] for kind in kinds], states, self.prices_us)
            for kinds, states in group.rank_states.items()
        }
        length = _SLICE // len(self.prices_us)
        for start in range(0, len(some), length):
            chosen = some[start : start + length]
            yield chosen, compose_steps(self._inputs(group, chosen, ends))

    def _inputs(
        self, group: WrittenGroup, some: Ints, rank_ends: Mapping[tuple[int, ...], RankEnds]
    ) -> StepInputs:
        rows, key = group.rows[some], group.key[some]
        return StepInputs(
            schedule=group.schedule,
            cut=group.cut,
            num_micro_batches=self.num_micro_batches[rows],
            passes=[self._passes(group, number, some) for number in range(len(group.cut.kinds))],
            rank_ends=rank_ends,
            agreement=group.agreement[:, some],
            key=key,
            hides=self.hides[rows],
            gathers_early=self.gathers_early[rows],
            transfers=group.transfers.of(some, self.prices_us),
            prices_us=self.prices_us,
            trainer=self.trainer,
            step_gap_us=self.trainer.step_gap_us + self.calibration.step_gap_us,
        )

    def _passes(self, group: WrittenGroup, number: int, some: Ints) -> ChunkPasses:
        """Return the passes of a kind of chunk, with what is reduced during the last one."""
        rows, key, kind = group.rows[some], group.key[some], group.cut.kinds[number]
        is_split = find_schedule(group.schedule).splits_backward
        last = self.passes["weight" if is_split else "both"]
        hides = self.hides[rows]
        return ChunkPasses(
            forward=self.passes["forward"].of(kind, rows),
            backward=self.passes["both"].of(kind, rows),
            backward_input=self.passes["input"].of(kind, rows) if is_split else None,
            backward_weight=last.of(kind, rows) if is_split else None,
            not_accumulated_us=last.sums_us(kind, rows),
            buckets=[
                Buckets(self.prices_us[:, item.numbers][:, key], item.counts[key] * hides)
                for item in group.states[number].buckets
                if np.any(item.counts)
            ],
            slowdown_ratio=self.trainer.overlap_slowdown_ratio,
        )
