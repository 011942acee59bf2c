"""What follows the pipeline: reduce gradients, update parameters, gather them.

Buckets of gradients whose collective may overlap are reduced from the last backward pass on, each
as soon as its share of that pass is done. The others follow when all has been computed. No rank
updates before all have reduced: the norm that gradients are clipped to, and whether any of them
overflowed, are those of the whole model. A step that found an overflow updates nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.simulator.steps.chunks import NEVER, LastPass, gather_during, reduce_early
from foretoken.simulator.steps.program import Column, Duration
from foretoken.simulator.training.chunk_timing import TimedChunk, TimingRules, list_buckets
from foretoken.simulator.training.pipeline import PipelineRun
from foretoken.simulator.training.stage_operators import StepOperators


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRules:
    """How a step ends.

    `pass_counts` says of every rank how often it runs each (kind of pass, chunk), `gap_us` what a
    step costs on the host; `lags` as `compose` takes them.
    """

    timing: TimingRules
    pass_counts: Sequence[Mapping[tuple[str, int], int]]
    gap_us: Column
    lags: Sequence[Column | float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank ends a step, in µs, as columns.

    `reduction_us` and `gather_us` are all it communicates, of which it waits for
    `exposed_reduction_us` and `exposed_gather_us`. `reduction_start_us` is when it begins to
    reduce gradients, `reduced_us` when it has.
    """

    reduction_start_us: Column
    reduced_us: Column
    reduction_us: Column
    exposed_reduction_us: Column
    check_us: Column
    update_us: Column
    gather_us: Column
    exposed_gather_us: Column

    @property
    def after_start_us(self) -> Column:
        """Time from the start of the update to its end."""
        return self.check_us + self.update_us + self.exposed_gather_us


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """The end of a step: all ranks begin to update at `update_start_us`."""

    ranks: Sequence[RankEnd]
    update_start_us: Column
    step_us: Column
    gap_us: Column
    lags: Sequence[Column | float]


def end_step(
    operators: StepOperators, passes: Sequence[TimedChunk], run: PipelineRun, rules: UpdateRules
) -> StepEnd:
    """Return how a step ends whose pipeline has run."""
    timing, lags = rules.timing, rules.lags
    ranks = [
        _end_rank(_RankWork(operators, rank, passes, run, rules.pass_counts[rank]), timing)
        for rank in range(len(operators.chunks_of_rank))
    ]
    if lags is None:
        lags = [timing.columns.lag(rank.reduced_us) for rank in ranks]
    reduced = [rank.reduced_us * lag for rank, lag in zip(ranks, lags, strict=True)]
    start_us = np.max(reduced, axis=0)
    longest_us = np.max([rank.after_start_us for rank in ranks], axis=0)
    return StepEnd(
        ranks=ranks,
        update_start_us=start_us,
        step_us=start_us + longest_us + rules.gap_us,
        gap_us=rules.gap_us,
        lags=lags,
    )


@dataclass(frozen=True, slots=True)
class _RankWork:
    """What a rank has done when it comes to the end of a step."""

    operators: StepOperators
    rank: int
    passes: Sequence[TimedChunk]
    run: PipelineRun
    pass_counts: Mapping[tuple[str, int], int]

    @property
    def carried_us(self) -> Column | float:
        """All that its communication stream has carried besides its passes."""
        return sum(
            self.passes[chunk].of_kind(kind).hidden_us * count
            for (kind, chunk), count in self.pass_counts.items()
        )

    @property
    def chunks(self) -> list[int]:
        """Its chunks in the order in which their last backward pass begins."""
        starts = self.run.last_backward_start_us
        held = self.operators.chunks_of_rank[self.rank]
        return sorted(held, key=lambda chunk: float(np.ravel(starts[chunk])[0]))


def _end_rank(work: _RankWork, timing: TimingRules) -> RankEnd:
    columns, operators = timing.columns, work.operators
    duration = timing.duration(work.rank)
    held = [operators.chunks[index] for index in work.chunks]
    none = columns.constant(0)
    end_us = none + work.run.rank_ends_us[work.rank]
    last = [
        LastPass.of_chunk(
            work.passes[index],
            none + work.run.last_backward_start_us[index],
            list_buckets(operators.chunks[index].states.reduction, duration),
        )
        for index in work.chunks
    ]
    start_us, free_us = reduce_early(last, work.carried_us, none)
    exposed = [
        node
        for chunk in held
        for node in chunk.states.reduction
        if node.overlap is not Overlap.DEFERRED
    ]
    computed_us = np.maximum(end_us, free_us)
    reduced_us = computed_us + _total(exposed, duration, none)
    all_reduction = [node for chunk in held for node in chunk.states.reduction]
    gathers = [node for chunk in held for node in chunk.states.gather]
    update_us = _total(operators.updates[work.rank], duration, none)
    hidden_by_us = np.sum([work.passes[index].forward.total_us for index in work.chunks], axis=0)
    updates = columns.updates
    return RankEnd(
        reduction_start_us=np.where(start_us == NEVER, end_us, start_us),
        reduced_us=reduced_us,
        reduction_us=_total(all_reduction, duration, none),
        exposed_reduction_us=reduced_us - work.run.rank_ends_us[work.rank],
        check_us=_total(operators.checks[work.rank], duration, none),
        update_us=update_us * updates,
        gather_us=_total(gathers, duration, none) * updates,
        exposed_gather_us=_gather(gathers, duration, hidden_by_us, timing) * updates,
    )


def _gather(
    gathers: Sequence[OperatorNode], duration: Duration, hidden_by_us: Column, timing: TimingRules
) -> Column:
    """Return what gathering parameters adds to a step."""
    none = timing.columns.constant(0)
    early = [node for node in gathers if node.overlap is Overlap.PREFETCH]
    late = [node for node in gathers if node.overlap is not Overlap.PREFETCH]
    waited_us = gather_during(
        _total(early, duration, none), hidden_by_us, timing.trainer.overlap_slowdown_ratio
    )
    return _total(late, duration, none) + waited_us


def _total(nodes: Iterable[OperatorNode], duration: Duration, none: Column) -> Column:
    return sum((duration(node) * node.repeat for node in nodes), none)
