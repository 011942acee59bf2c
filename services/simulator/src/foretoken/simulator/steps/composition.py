"""Put the times of chunks together to steps in closed form, for one case or a hundred thousand.

The passes of ranks end about when the chains of their schedule say (see `PipelineEnds`); what
follows is the rule of `step_end.py`, which the event simulator's step ends by too. All times are
columns in µs: [variant, case], a variant being one way to price calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.steps.chunks import NEVER, ChunkPasses, LastPass, time_pair
from foretoken.simulator.steps.pipelines.ends import PipelineEnds
from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules, Time
from foretoken.simulator.steps.pipelines.formulas import PipelineShape
from foretoken.simulator.steps.step_end import RankEnd, RankWork, StepEnd

# What the output of a chunk takes to the next one and its gradient back, in µs.
Sends = tuple[Time, Time]
STAYS: Sends = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankTotals:
    """What a rank runs once its passes have ended, in µs, and not what hides it.

    Sums of gradients that are always waited for, of which `kernels_us` compute, and `buckets_us`
    that may overlap; checks, update and the gathering of parameters.
    """

    reduction_us: Floats
    buckets_us: Floats
    kernels_us: Floats
    check_us: Floats
    update_us: Floats
    gather_us: Floats


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What steps are made of whose ranks hold chunks alike and have one schedule.

    `chunks_of_rank` are by rank of the pipeline, with `is_mirrored` each chunk is of two. `passes`
    and `sends` are by chunk in the order of the model, `totals` by rank; those that are alike are
    one object. `hides` tells whether gradients are reduced during the last backward pass,
    `gathers_early` whether parameters are gathered during the next step's. Where stages are not
    alike (`is_mixed`), some schedules are run event by event.
    """

    schedule: str
    chunks_of_rank: Sequence[Sequence[int]]
    is_mirrored: bool
    is_mixed: bool
    num_micro_batches: Ints
    passes: Sequence[ChunkPasses]
    sends: Sequence[Sends]
    totals: Sequence[RankTotals]
    hides: Flags
    gathers_early: Flags
    trainer: TrainerProfile
    step_gap_us: float

    @property
    def links(self) -> LinkRules:
        """How ranks of the pipeline send."""
        trainer = self.trainer
        return LinkRules(
            transfers=trainer.transfers_between(len(self.chunks_of_rank[0])),
            has_duplex_links=trainer.has_duplex_links,
        )

    @cached_property
    def num_runs(self) -> Floats:
        """How often a rank runs each of its passes: of chunks that two hold, half."""
        runs: Floats = self.num_micro_batches / (2 if self.is_mirrored else 1)
        return runs

    @property
    def alike_ranks(self) -> list[list[int]]:
        """The ranks that do the same, together."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, chunks in enumerate(self.chunks_of_rank):
            key = (*(id(self.passes[chunk]) for chunk in chunks), id(self.totals[rank]))
            found.setdefault(key, []).append(rank)
        return list(found.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepColumns:
    """Steps in µs, [variant, case], and what of them is what in the first variant."""

    step_us: Floats
    busy_ratio: Floats
    exposed_us: Floats


def compose_steps(parts: StepParts) -> StepColumns:
    """Run the pipeline, reduce gradients, then update all ranks together."""
    times = _time_chunks(parts)
    shape = PipelineShape(
        chunk_times=times,
        num_ranks=len(parts.chunks_of_rank),
        num_micro_batches=parts.num_micro_batches,
        rules=parts.links,
    )
    pipeline = PipelineEnds.of_shape(parts.schedule, shape, is_mixed=parts.is_mixed)
    none = np.zeros_like(times[0].forward_us)
    busy_us, critical_us, exposed_us = none[0], np.full_like(none[0], NEVER), none[0]
    ends = []
    for ranks in parts.alike_ranks:
        end_us = none + reduce(np.maximum, [pipeline.ends_us[rank] for rank in ranks])
        totals = parts.totals[ranks[0]]
        end = RankEnd.of_work(_find_work(parts, ranks[0], end_us, pipeline))
        ends.append(end)
        own_us, own_exposed_us = _account(parts, ranks[0], end_us[0], pipeline)
        own_us = own_us + (end.reduced_us - end_us + end.after_start_us)[0]
        waited_us = end.exposed_reduction_us + end.exposed_gather_us - totals.kernels_us
        own_exposed_us = own_exposed_us + waited_us[0]
        busy_us = busy_us + len(ranks) * (own_us + parts.step_gap_us)
        is_critical = own_us > critical_us
        critical_us = np.where(is_critical, own_us, critical_us)
        exposed_us = np.where(is_critical, own_exposed_us, exposed_us)
    step_us = StepEnd.of_ranks(ends, parts.step_gap_us).step_us
    return StepColumns(
        step_us=step_us,
        busy_ratio=busy_us / (len(parts.chunks_of_rank) * step_us[0]),
        exposed_us=np.maximum(0.0, exposed_us),
    )


def _time_chunks(parts: StepParts) -> list[ChunkTimes]:
    """Return what chunks take, one object for all that are alike."""
    known: dict[tuple[int, ...], ChunkTimes] = {}
    found = []
    for chunk, passes in enumerate(parts.passes):
        sent, back = parts.sends[chunk][0], (parts.sends[chunk - 1] if chunk else STAYS)[1]
        key = (id(passes), id(sent), id(back), chunk if parts.is_mirrored else 0)
        if key not in known:
            known[key] = passes.times(sent, back, _pair(parts, chunk))
        found.append(known[key])
    return found


def _pair(parts: StepParts, chunk: int) -> Mapping[tuple[str, int], Floats]:
    """Return a chunk's forward pass overlapped with a backward pass of its mirror image."""
    if not parts.is_mirrored:
        return {}
    mirrored = len(parts.passes) - 1 - chunk
    ahead, back = parts.passes[chunk].forward, parts.passes[mirrored].backward
    return {("backward", mirrored): time_pair(ahead, back, parts.trainer.overlap_slowdown_ratio)}


def _find_work(parts: StepParts, rank: int, end_us: Floats, pipeline: PipelineEnds) -> RankWork:
    passes = [parts.passes[chunk] for chunk in parts.chunks_of_rank[rank]]
    totals = parts.totals[rank]
    return RankWork(
        end_us=end_us,
        last=_list_last(parts, rank, end_us, pipeline),
        carried_us=_total(
            [
                item.hidden_us * parts.num_runs
                for own in passes
                for item in (own.forward, *own.backward_passes)
            ]
        ),
        waited_us=totals.reduction_us + totals.buckets_us * ~parts.hides,
        check_us=totals.check_us,
        update_us=totals.update_us,
        early_gather_us=totals.gather_us * parts.gathers_early,
        late_gather_us=totals.gather_us * ~parts.gathers_early,
        forward_us=_total([own.forward.total_us for own in passes]),
        slowdown_ratio=parts.trainer.overlap_slowdown_ratio,
    )


def _list_last(
    parts: StepParts, rank: int, end_us: Floats, pipeline: PipelineEnds
) -> list[LastPass]:
    """Return the last backward passes of a rank.

    Its chunks are in the order of the model, so the last backward pass is of the first one; where
    their schedule does not say more, before it come those of the first chunk for the micro batches
    of a round, and so on.
    """
    after_us = np.zeros_like(end_us)
    last: list[LastPass] = []
    round_size = np.minimum(parts.num_micro_batches, len(parts.chunks_of_rank))
    for chunk in parts.chunks_of_rank[rank]:
        passes = parts.passes[chunk]
        if not pipeline.starts_us:
            last_us = passes.last_gradients_us
            last_us = last_us - passes.not_accumulated_us * (parts.num_micro_batches == 1)
            start_us = end_us - after_us - last_us
        else:
            start_us = pipeline.starts_us[chunk]
        last.insert(0, LastPass.of_chunk(passes, start_us, passes.buckets))
        after_us = after_us + round_size * passes.backward_us
        if parts.is_mirrored or passes.backward_weight is not None:
            after_us = np.zeros_like(end_us)
    return last


def _account(
    parts: StepParts, rank: int, end_us: Floats, pipeline: PipelineEnds
) -> tuple[Floats, Floats]:
    """Return how long a rank computes or communicates in its passes, and what of it exposed."""
    busy_us, exposed_us = np.zeros_like(end_us), np.zeros_like(end_us)
    sent_us = np.zeros_like(end_us)
    for chunk in parts.chunks_of_rank[rank]:
        passes = parts.passes[chunk]
        for item in (passes.forward, *passes.backward_passes):
            busy_us = busy_us + parts.num_runs * item.total_us[0]
            exposed_us = exposed_us + parts.num_runs * item.all_exposed_us[0]
        busy_us = busy_us - passes.not_accumulated_us[0] + passes.reduction_slowdown_us[0]
        for sends in (parts.sends[chunk], parts.sends[chunk - 1] if chunk else STAYS):
            if sends is not STAYS:
                sent_us = sent_us + np.asarray(sends[0])[0] + np.asarray(sends[1])[0]
    sent_us = np.minimum(sent_us * parts.num_runs, np.maximum(0.0, end_us - busy_us))
    if pipeline.held_us:
        sent_us = np.asarray(pipeline.held_us[rank])[0]
    return busy_us + sent_us, exposed_us + sent_us


def _total(parts: Sequence[Floats]) -> Floats:
    return reduce(np.add, parts)
