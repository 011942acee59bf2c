"""Put the times of chunks together to steps, in columns, as `composition` does for one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkCut
from foretoken.simulator.search.training.state_columns import Calls, ChunkStates
from foretoken.simulator.search.training.transfer_columns import TransferTimes
from foretoken.simulator.steps.chunks import (
    NEVER,
    ChunkPasses,
    LastPass,
    gather_during,
    reduce_early,
    time_pair,
)
from foretoken.simulator.training.closed_form import PipelineShape, estimate_rank_ends_us
from foretoken.simulator.training.pipeline import ChunkTimes, LinkRules

# The parts of `RankEnds`.
_REDUCTION, _BUCKETS, _KERNELS, _CHECKS, _UPDATE, _GATHER = range(6)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankStates:
    """What a rank runs once it has reduced its gradients, one entry per key."""

    checks: tuple[Calls, ...]
    updates: tuple[Calls, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankEnds:
    """What ends the steps of ranks in µs, (part, variant, key), in the order of its fields.

    What is reduced once all is computed, of that the buckets that may be hidden, and the kernels;
    checks, update and the gathering of parameters.
    """

    parts_us: Floats

    @classmethod
    def of_calls(
        cls, states: Sequence[ChunkStates], rank: RankStates, prices_us: Floats
    ) -> "RankEnds":
        """Add up the calls of a rank whose chunks have these states."""
        parts = [
            [calls for chunk in states for calls in chunk.reduction],
            [calls for chunk in states for calls in chunk.buckets],
            [calls for chunk in states for calls in chunk.kernels],
            rank.checks,
            rank.updates,
            [calls for chunk in states for calls in chunk.gather],
        ]
        none = np.zeros((len(prices_us), len(states[0].num_updated)))
        totals = [sum((calls.total_us(prices_us) for calls in part), none) for part in parts]
        return cls(np.stack(totals))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInputs:
    """What steps of strategies are made of, that cut the model alike and have one schedule.

    `passes` are by kind of chunk, `rank_ends` by the kinds of chunks of a rank.
    `key` finds the states of a strategy, `hides` tells whether gradients are reduced during the
    last backward pass, and `gathers_early` whether parameters are gathered during the next step's.
    """

    schedule: str
    cut: ChunkCut
    num_micro_batches: Ints
    passes: Sequence[ChunkPasses]
    rank_ends: Mapping[tuple[int, ...], RankEnds]
    agreement: Ints
    key: Ints
    hides: Flags
    gathers_early: Flags
    transfers: TransferTimes
    prices_us: Floats
    trainer: TrainerProfile
    step_gap_us: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepColumns:
    """Steps in µs, (variant, strategy), and what of them is what in the first variant."""

    step_us: Floats
    busy_ratio: Floats
    exposed_us: Floats


def compose_steps(inputs: StepInputs) -> StepColumns:
    """Return the steps of strategies."""
    return _Steps(inputs).compose()


class _Steps:
    def __init__(self, inputs: StepInputs) -> None:
        self._in = inputs
        self._num_ranks = len(inputs.cut.ranks)
        self._known_chunks: dict[tuple[object, ...], ChunkTimes] = {}
        self._agreement_us = inputs.prices_us[:, inputs.agreement].sum(axis=1)
        # A rank whose chunks another holds too runs half of the micro batches of each.
        self._runs = inputs.num_micro_batches / (2 if inputs.cut.is_mirrored else 1)

    def compose(self) -> StepColumns:
        """Run the pipeline, reduce gradients, then update all ranks together."""
        inputs = self._in
        chunks = [self._chunk_times(chunk) for chunk in range(len(inputs.cut.kind_of_chunk))]
        shape = PipelineShape(
            chunk_times=chunks,
            num_ranks=self._num_ranks,
            num_micro_batches=inputs.num_micro_batches,
            rules=LinkRules(
                transfers=inputs.trainer.transfers, has_duplex_links=inputs.trainer.has_duplex_links
            ),
        )
        ends = estimate_rank_ends_us(inputs.schedule, shape)
        none = np.zeros_like(chunks[0].forward_us)
        start_us, after_us, busy_us = none, none, none[0]
        critical_us, exposed_us = np.full_like(none[0], NEVER), none[0]
        for kinds, ranks in inputs.cut.rank_kinds.items():
            end_us = none + reduce(np.maximum, [ends[rank] for rank in ranks])
            ends_us = np.take(inputs.rank_ends[kinds].parts_us, inputs.key, axis=2)
            reduced_us, waited_us = self._reduce(kinds, end_us, ends_us)
            start_us = np.maximum(start_us, reduced_us)
            update_us, gather_us = self._update(kinds, ends_us)
            after_us = np.maximum(after_us, update_us + gather_us)
            own_us, own_exposed_us = self._account(kinds, ranks[0], end_us[0])
            own_us = own_us + (reduced_us - end_us + update_us + gather_us)[0]
            own_exposed_us = own_exposed_us + (waited_us + gather_us - ends_us[_KERNELS])[0]
            busy_us = busy_us + len(ranks) * (own_us + inputs.step_gap_us)
            is_critical = own_us > critical_us
            critical_us = np.where(is_critical, own_us, critical_us)
            exposed_us = np.where(is_critical, own_exposed_us, exposed_us)
        step_us = start_us + after_us + inputs.step_gap_us
        return StepColumns(
            step_us=step_us,
            busy_ratio=busy_us / (self._num_ranks * step_us[0]),
            exposed_us=np.maximum(0.0, exposed_us),
        )

    def _chunk_times(self, chunk: int) -> ChunkTimes:
        """Return what a chunk takes, one object for all that are alike."""
        cut, transfers = self._in.cut, self._in.transfers
        kind = cut.kind_of_chunk[chunk]
        held = cut.kinds[kind]
        key = (
            kind,
            transfers.way(chunk) if held.receives_gradient else b"",
            transfers.way(chunk - 1) if held.receives_input else b"",
            chunk if cut.is_mirrored else 0,
        )
        if key not in self._known_chunks:
            self._known_chunks[key] = self._time_chunk(chunk)
        return self._known_chunks[key]

    def _time_chunk(self, chunk: int) -> ChunkTimes:
        inputs = self._in
        kind = inputs.cut.kind_of_chunk[chunk]
        held, passes, transfers = inputs.cut.kinds[kind], inputs.passes[kind], inputs.transfers
        none = np.zeros_like(passes.forward.total_us)
        return passes.times(
            transfers.forward_us(chunk) if held.receives_gradient else none,
            transfers.backward_us(chunk - 1) if held.receives_input else none,
            self._pair(chunk),
        )

    def _pair(self, chunk: int) -> dict[tuple[str, int], Floats]:
        """Return a chunk's forward pass overlapped with a backward pass of its mirror image."""
        inputs = self._in
        if not inputs.cut.is_mirrored:
            return {}
        mirrored = len(inputs.cut.kind_of_chunk) - 1 - chunk
        ahead = inputs.passes[inputs.cut.kind_of_chunk[chunk]].forward
        back = inputs.passes[inputs.cut.kind_of_chunk[mirrored]].backward
        slowdown = inputs.trainer.overlap_slowdown_ratio
        return {("backward", mirrored): time_pair(ahead, back, slowdown)}

    def _reduce(
        self, kinds: Sequence[int], end_us: Floats, ends_us: Floats
    ) -> tuple[Floats, Floats]:
        """Return when a rank has reduced all gradients, and what of that it waits after its end.

        Its chunks are in the order of the model, so the last backward pass is of the first one;
        before it come those of the first chunk for the micro batches of a round, and so on.
        """
        inputs = self._in
        after_us = np.zeros_like(end_us)
        last: list[LastPass] = []
        round_size = np.minimum(inputs.num_micro_batches, self._num_ranks)
        for kind in kinds:
            passes = inputs.passes[kind]
            last_us = passes.last_gradients_us
            last_us = last_us - passes.not_accumulated_us * (inputs.num_micro_batches == 1)
            last.insert(0, LastPass.of_chunk(passes, end_us - after_us - last_us, passes.buckets))
            after_us = after_us + round_size * passes.backward_us
            if inputs.cut.is_mirrored or passes.backward_weight is not None:
                after_us = np.zeros_like(end_us)
        _, free_us = reduce_early(last, self._carried_us(kinds), np.zeros_like(end_us))
        computed_us = np.maximum(end_us, free_us)
        exposed_us = ends_us[_REDUCTION] + ends_us[_BUCKETS] * ~inputs.hides
        return computed_us + exposed_us, computed_us - end_us + exposed_us

    def _carried_us(self, kinds: Sequence[int]) -> Floats:
        """Return all that a rank's communication carries besides its passes."""
        parts = [
            item.hidden_us * self._runs
            for kind in kinds
            for item in (self._in.passes[kind].forward, *self._in.passes[kind].backward_passes)
        ]
        return _total(parts)

    def _update(self, kinds: tuple[int, ...], ends_us: Floats) -> tuple[Floats, Floats]:
        """Return checks and update of a rank, and what gathering parameters adds to the step."""
        inputs = self._in
        check_us, update_us, gather_us = ends_us[_CHECKS], ends_us[_UPDATE], ends_us[_GATHER]
        check_us = check_us + self._agreement_us
        beside_us = _total([inputs.passes[kind].forward.total_us for kind in kinds])
        waited_us = gather_during(gather_us, beside_us, inputs.trainer.overlap_slowdown_ratio)
        return check_us + update_us, np.where(inputs.gathers_early, waited_us, gather_us)

    def _account(self, kinds: Sequence[int], rank: int, end_us: Floats) -> tuple[Floats, Floats]:
        """Return how long a rank computes or communicates in its passes, and what of it exposed."""
        inputs = self._in
        busy_us, exposed_us = np.zeros_like(end_us), np.zeros_like(end_us)
        for kind in kinds:
            passes = inputs.passes[kind]
            for item in (passes.forward, *passes.backward_passes):
                busy_us = busy_us + self._runs * item.total_us[0]
                exposed_us = exposed_us + self._runs * item.all_exposed_us[0]
            busy_us = busy_us - passes.not_accumulated_us[0] + passes.reduction_slowdown_us[0]
        sent_us = np.zeros_like(end_us)
        for chunk in inputs.cut.ranks[rank]:
            held = inputs.cut.kinds[inputs.cut.kind_of_chunk[chunk]]
            for at, is_there in ((chunk, held.receives_gradient), (chunk - 1, held.receives_input)):
                if is_there:
                    sent_us = sent_us + inputs.transfers.forward_us(at)[0]
                    sent_us = sent_us + inputs.transfers.backward_us(at)[0]
        sent_us = np.minimum(sent_us * self._runs, np.maximum(0.0, end_us - busy_us))
        return busy_us + sent_us, exposed_us + sent_us


def _total(parts: Sequence[Floats]) -> Floats:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
