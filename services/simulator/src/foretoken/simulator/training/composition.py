"""Put the priced operators of all chunks together to one step, and what follows the pipeline."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.chunks import LastPass, time_pair
from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules, Pipeline, PipelineRun
from foretoken.simulator.steps.pipelines.schedule import (
    PairKey,
    PipelineSchedule,
    RankOrder,
    pair_key,
)
from foretoken.simulator.steps.program import Column, Duration
from foretoken.simulator.steps.stage_operators import StepOperators
from foretoken.simulator.steps.step_end import RankEnd, RankWork, StepEnd, host_gap_us
from foretoken.simulator.training.chunk_timing import (
    TimedChunk,
    TimingRules,
    list_buckets,
    time_chunk,
)
from foretoken.simulator.training.operator_prices import OperatorPrices
from foretoken.simulator.training.variability import StepColumns


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRules:
    """What a step is composed by: schedule, framework, and the user's calibration."""

    orders: Sequence[RankOrder]
    splits_backward: bool
    trainer: TrainerProfile
    calibration: TrainingCalibration

    @classmethod
    def of_scenario(
        cls, scenario: TrainingScenario, schedule: PipelineSchedule, orders: Sequence[RankOrder]
    ) -> Self:
        """Return the rules of a scenario."""
        return cls(
            orders=orders,
            splits_backward=schedule.splits_backward,
            trainer=scenario.trainer.resolve(),
            calibration=scenario.calibration or TrainingCalibration(),
        )

    @property
    def links(self) -> LinkRules:
        """How ranks of the pipeline send."""
        trainer = self.trainer
        num_chunks = len({item.chunk for slot in self.orders[0] for item in slot})
        return LinkRules(
            transfers=trainer.transfers_between(num_chunks),
            has_duplex_links=trainer.has_duplex_links,
        )

    def count_passes(self, rank: int) -> Counter[tuple[str, int]]:
        """Return how often a rank runs each (kind of pass, chunk) in a step."""
        return Counter((item.kind, item.chunk) for slot in self.orders[rank] for item in slot)

    def list_pairs(self) -> Sequence[PairKey]:
        """Return which passes share a slot: chunk of the forward one, kind and chunk of the other.

        Pairs of another make run one after the other.
        """
        pairs = {slot for order in self.orders for slot in order if len(slot) > 1}
        return sorted({key for slot in pairs if (key := pair_key(slot)) is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedStep:
    """A step put together, in µs, as columns; all of it still to be multiplied by `factor`.

    `pairs_us` are slots of two passes: by chunk of the forward pass, kind and chunk of the other.
    """

    timing: TimingRules
    passes: Sequence[TimedChunk]
    pairs_us: Mapping[PairKey, Column]
    run: PipelineRun
    end: StepEnd
    factor: Column

    @property
    def step_us(self) -> Column:
        """Time of the whole step."""
        return self.end.step_us * self.factor


class StepComposition:
    """The chunks of a step with their schedule and prices."""

    def __init__(
        self,
        operators: StepOperators,
        prices: OperatorPrices,
        rules: StepRules,
        on_events: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep what a step is made of; `on_events` is called now and then while it runs."""
        self.operators = operators
        self.prices = prices
        self.rules = rules
        self._pipeline = Pipeline(rules.orders, rules.links, on_events)
        self.pass_counts = [rules.count_passes(rank) for rank in range(len(rules.orders))]
        self._pairs = rules.list_pairs()

    def compose(
        self, columns: StepColumns, lags: Sequence[Column | float] | None = None
    ) -> ComposedStep:
        """Run the pipeline, then reduce gradients, then update all ranks together.

        `lags` tell of every rank how much later the slowest replica has its gradients, as a ratio
        of the time since the step's start; without them the columns are draws that find it out.
        """
        trainer, calibration = self.rules.trainer, self.rules.calibration
        timing = TimingRules(
            prices=self.prices,
            columns=columns,
            trainer=trainer,
            calibration=calibration,
            splits_backward=self.rules.splits_backward,
        )
        passes = [self._time_chunk(index, timing) for index in range(len(self.operators.chunks))]
        pairs_us = {
            (ahead, kind, back): time_pair(
                passes[ahead].forward, passes[back].of_kind(kind), trainer.overlap_slowdown_ratio
            )
            for ahead, kind, back in self._pairs
        }
        run = self._pipeline.run(_pipeline_times(passes, pairs_us))
        gap_us = columns.calibrated(host_gap_us(trainer, calibration), host_gap_us(trainer, None))
        done = RunPipeline(
            operators=self.operators, passes=passes, run=run, pass_counts=self.pass_counts
        )
        ends = [
            RankEnd.of_work(done.left_to(rank, timing)) for rank in range(len(self.rules.orders))
        ]
        if lags is None:
            lags = [columns.lag(rank.reduced_us) for rank in ends]
        end = StepEnd.of_ranks(ends, gap_us, lags)
        factor = columns.calibrated(calibration.step_factor, 1.0)
        return ComposedStep(
            timing=timing, passes=passes, pairs_us=pairs_us, run=run, end=end, factor=factor
        )

    def _time_chunk(self, index: int, timing: TimingRules) -> TimedChunk:
        rank = self.operators.rank_of_chunk(index)
        count, chunk = self.pass_counts[rank]["forward", index], self.operators.chunks[index]
        far = None if chunk.far_end is None else timing.duration(chunk.far_end.stage, count)
        return time_chunk(chunk, timing.duration(rank, count), timing, far)


def _pipeline_times(
    passes: Sequence[TimedChunk], pairs_us: Mapping[PairKey, Column]
) -> list[ChunkTimes]:
    """Return the times that the pipeline runs chunks with."""
    together: list[dict[tuple[str, int], Column]] = [{} for _ in passes]
    for (ahead, kind, back), time_us in pairs_us.items():
        together[ahead][kind, back] = time_us
    return [
        item.times(item.send_us, passes[index - 1].send_back_us if index else 0.0, together[index])
        for index, item in enumerate(passes)
    ]
