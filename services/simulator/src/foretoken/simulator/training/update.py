"""What the ranks of a scenario's pipeline have still to do when it has run; see `step_end.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.simulator.steps.chunks import LastPass
from foretoken.simulator.steps.pipelines.events import PipelineRun
from foretoken.simulator.steps.program import Column, Duration
from foretoken.simulator.steps.stage_operators import StepOperators
from foretoken.simulator.steps.step_end import RankWork
from foretoken.simulator.training.chunk_timing import TimedChunk, TimingRules, list_buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPipeline:
    """A pipeline that has run: `pass_counts` of every rank how often it ran each (kind, chunk)."""

    operators: StepOperators
    passes: Sequence[TimedChunk]
    run: PipelineRun
    pass_counts: Sequence[Mapping[tuple[str, int], int]]

    def left_to(self, rank: int, timing: TimingRules) -> RankWork:
        """Return what a rank has still to do."""
        operators, columns, run = self.operators, timing.columns, self.run
        duration, none, updates = timing.duration(rank), columns.constant(0), columns.updates
        held = self._chunks_of(rank)
        chunks = [operators.chunks[index] for index in held]
        reduction = [node for chunk in chunks for node in chunk.states.reduction]
        gathers = [node for chunk in chunks for node in chunk.states.gather]
        early = [node for node in gathers if node.overlap is Overlap.PREFETCH]
        late = [node for node in gathers if node.overlap is not Overlap.PREFETCH]
        waited = [node for node in reduction if node.overlap is not Overlap.DEFERRED]
        return RankWork(
            end_us=none + run.rank_ends_us[rank],
            last=[
                LastPass.of_chunk(
                    self.passes[index],
                    none + run.last_backward_start_us[index],
                    list_buckets(operators.chunks[index].states.reduction, duration),
                )
                for index in held
            ],
            carried_us=sum(
                self.passes[chunk].of_kind(kind).hidden_us * count
                for (kind, chunk), count in self.pass_counts[rank].items()
            ),
            waited_us=_total(waited, duration, none),
            check_us=_total(operators.checks[rank], duration, none),
            update_us=_total(operators.updates[rank], duration, none) * updates,
            early_gather_us=_total(early, duration, none) * updates,
            late_gather_us=_total(late, duration, none) * updates,
            forward_us=np.sum([self.passes[index].forward.total_us for index in held], axis=0),
            slowdown_ratio=timing.trainer.overlap_slowdown_ratio,
        )

    def _chunks_of(self, rank: int) -> list[int]:
        """Return the chunks of a rank in the order in which their last backward pass begins."""
        starts = self.run.last_backward_start_us
        held = self.operators.chunks_of_rank[rank]
        return sorted(held, key=lambda chunk: float(np.ravel(starts[chunk])[0]))


def _total(nodes: Iterable[OperatorNode], duration: Duration, none: Column) -> Column:
    return sum((duration(node) * node.repeat for node in nodes), none)
