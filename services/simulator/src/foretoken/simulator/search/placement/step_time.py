"""Time of a step in closed form, for strategies of as many stages, chunks and micro batches.

The passes of a rank end about when the chains of its schedule say. Then it reduces its gradients,
each chunk during its last backward pass as far as that hides it; all update when the last one has
reduced.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.cutting import count_by_chunk, transfer_times
from foretoken.simulator.search.placement.layer_kind import list_layer_kinds
from foretoken.simulator.search.placement.stage_cost import (
    BETWEEN,
    FIRST,
    LAST,
    MEASURES,
    ONLY,
    StageLines,
    StagePrices,
)
from foretoken.simulator.search.placement.strategy import PlacedStrategy, PlacementSpace
from foretoken.simulator.steps.chunks import Buckets, LastPass, reduce_early
from foretoken.simulator.training.closed_form import PipelineShape, estimate_rank_ends_us
from foretoken.simulator.training.pipeline import ChunkTimes, LinkRules, Pipeline, Time
from foretoken.simulator.training.schedule import find_schedule

# Schedules whose formula is exact for stages that differ.
_WITH_FORMULA = ("gpipe", "one_f_one_b")
# Micro batches for each stage after which every one more takes as long.
_NUM_ROUNDS = 3
# Measures of the passes of chunks; the others are of a stage.
_OF_PASSES = ("exposed",)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStages:
    """The stages of one strategy: the lines of each, the layers of its chunks, what they send.

    `layers` is (chunks, kinds of layer), `transfers` (forward and back, stages, cases).
    """

    lines: Sequence[StageLines]
    layers: Ints
    transfers: Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepFigures:
    """Steps of strategies: `step_us` is (strategies, cases), the ratios (strategies)."""

    step_us: Floats
    bubble_ratio: Floats
    exposed_ratio: Floats


def time_steps(
    placed: Sequence[PlacedStages],
    num_micro_batches: int,
    schedule: str,
    scenario: TrainingScenario,
) -> StepFigures:
    """Return the steps of strategies of one number of stages, of chunks, and of micro batches."""
    times = _StageTimes(placed, num_micro_batches)
    trainer = scenario.trainer.resolve()
    calibration = scenario.calibration or TrainingCalibration()
    shape = PipelineShape(
        chunk_times=times.chunk_times(),
        num_ranks=times.num_stages,
        num_micro_batches=num_micro_batches,
        rules=LinkRules(transfers=trainer.transfers, has_duplex_links=trainer.has_duplex_links),
    )
    passes = _time_passes(schedule, shape)
    ends_us = times.as_table(passes.ends_us)
    left_us = times.left_us(None if passes.starts_us is None else times.as_table(passes.starts_us))
    end_us = times.of_stages("check") + times.of_stages("update") + times.of_stages("gather")
    step_us = (ends_us + left_us).max(axis=1) + end_us.max(axis=1)
    step_us = step_us + trainer.step_gap_us + calibration.step_gap_us
    busy_us = (times.busy_us() + left_us + end_us)[:, :, 0]
    exposed_us = num_micro_batches * times.of_stages("exposed") + left_us
    exposed_us = (exposed_us + times.of_stages("gather"))[:, :, 0]
    critical = busy_us.argmax(axis=1)[:, None]
    exposed_us = np.take_along_axis(exposed_us, critical, axis=1)[:, 0]
    return StepFigures(
        step_us=step_us * calibration.step_factor,
        bubble_ratio=np.maximum(0.0, 1 - busy_us.mean(axis=1) / step_us[:, 0]),
        exposed_ratio=np.minimum(1.0, exposed_us / step_us[:, 0]),
    )


@dataclass(frozen=True, slots=True)
class _Passes:
    """When ranks end their passes, and when each chunk begins its last one, counted from there.

    The second is none where only the formula of a schedule is known. Lists of columns.
    """

    ends_us: Sequence[Time]
    starts_us: Sequence[Time] | None


def _time_passes(schedule: str, shape: PipelineShape) -> _Passes:
    """Return the passes by the formula of a schedule, or as the event simulator runs them.

    Formulas of other schedules take stages to be alike. What many micro batches more take than some
    is taken to grow by as much for each.
    """
    if schedule in _WITH_FORMULA:
        return _Passes(estimate_rank_ends_us(schedule, shape), None)
    some, many = _NUM_ROUNDS * shape.num_ranks, (_NUM_ROUNDS + 1) * shape.num_ranks
    count = int(shape.num_micro_batches)
    if count <= many:
        return _run_passes(schedule, shape, count)
    few = _run_passes(schedule, shape, some)
    more = _run_passes(schedule, shape, many)
    steps = (count - many) / shape.num_ranks
    ends = [
        later + steps * (later - sooner)
        for sooner, later in zip(few.ends_us, more.ends_us, strict=True)
    ]
    return _Passes(ends, more.starts_us)


def _run_passes(schedule: str, shape: PipelineShape, num_micro_batches: int) -> _Passes:
    rounds = len(shape.chunk_times) // shape.num_ranks
    pipeline = _build_pipeline(schedule, (shape.num_ranks, num_micro_batches, rounds), shape.rules)
    run = pipeline.run(shape.chunk_times)
    starts = [
        start - run.rank_ends_us[chunk % shape.num_ranks]
        for chunk, start in enumerate(run.last_backward_start_us)
    ]
    return _Passes(run.rank_ends_us, starts)


@lru_cache(maxsize=64)
def _build_pipeline(schedule: str, numbers: tuple[int, int, int], rules: LinkRules) -> Pipeline:
    """Return a pipeline of so many ranks, micro batches, and chunks per rank."""
    return Pipeline(find_schedule(schedule).orders(*numbers), rules)


class _StageTimes:
    """The measures of all chunks: (strategies, chunks, cases), chunks in the model's order."""

    def __init__(self, placed: Sequence[PlacedStages], num_micro_batches: int) -> None:
        self.num_stages = len(placed[0].lines)
        self._num_micro_batches = num_micro_batches
        self._num_chunks = len(placed[0].layers)
        constants, per_layer = _lines_by_chunk(placed)
        layers = np.array([item.layers for item in placed])
        self._layered = np.einsum("sck,sckmb->scmb", layers, per_layer)
        self._constants = constants
        self._values = np.maximum(0.0, constants + self._layered)
        self._transfers = np.array([item.transfers for item in placed])
        self._num_cases = self._transfers.shape[-1]

    def of(self, name: str) -> Floats:
        """Return a measure of every chunk."""
        found: Floats = self._values[:, :, MEASURES.index(name)]
        return found

    def of_stages(self, name: str) -> Floats:
        """Return a measure of every stage: what its layers have, and it has besides them once.

        What chunks do in their passes they all have in addition.
        """
        at = MEASURES.index(name)
        if name in _OF_PASSES:
            return self._add_up(self._values[:, :, at])
        of_layers = self._add_up(self._layered[:, :, at])
        # The first stage has the first chunk, and the last one the last.
        constant = self._constants[:, : self.num_stages, at].copy()
        constant[:, -1] = self._constants[:, -1, at]
        return np.maximum(0.0, of_layers + constant)

    def chunk_times(self) -> list[ChunkTimes]:
        """Return what the formulas take: columns over strategies and cases."""
        forward, inputs, weights = (
            self.of(name) for name in ("forward", "backward_input", "backward_weight")
        )
        both = inputs + weights
        first, last = both - self.of("not_accumulated"), both + self.of("slowdown")
        send, back = self._transfers[:, 0], self._transfers[:, 1]
        none = np.zeros_like(send[:, 0])
        last_chunk = self._num_chunks - 1
        return [
            ChunkTimes(
                forward_us=forward[:, chunk].ravel(),
                backward_input_us=inputs[:, chunk].ravel(),
                backward_weight_us=weights[:, chunk].ravel(),
                first_backward_us=first[:, chunk].ravel(),
                last_backward_us=last[:, chunk].ravel(),
                send_forward_us=(
                    none if chunk == last_chunk else send[:, chunk % self.num_stages]
                ).ravel(),
                send_backward_us=(
                    back[:, (chunk - 1) % self.num_stages] if chunk else none
                ).ravel(),
            )
            for chunk in range(last_chunk + 1)
        ]

    def as_table(self, columns: Sequence[Time]) -> Floats:
        """Return columns over strategies and cases as (strategies, ranks or chunks, cases)."""
        shape = len(self._values), self._num_cases
        return np.stack([np.reshape(column, shape) for column in columns], axis=1)

    def left_us(self, starts_us: Floats | None) -> Floats:
        """Return what of its reductions a stage waits for when its passes have ended.

        Buckets are ready one after the other over the last backward pass of their chunk.
        `starts_us` is when that begins, counted from the end of the stage's passes; a stage of one
        chunk ends with it.
        """
        deferred, count = self.of("deferred"), np.maximum(1.0, self.of("buckets"))
        buckets = Buckets(deferred / count, np.where(deferred > 0, count, 0.0))
        is_single = self._num_micro_batches == 1
        last_us = self.of("backward_weight")
        if not np.any(last_us > 0):
            last_us = self.of("backward_input") - self.of("not_accumulated") * is_single
        last_us = last_us + self.of("slowdown")
        starts = -last_us if starts_us is None else starts_us
        none = np.zeros((len(deferred), self.num_stages, self._num_cases))
        # The chunk that a stage holds last is the first to end.
        firsts = range(self._num_chunks - self.num_stages, -1, -self.num_stages)
        passes = [
            LastPass(
                start_us=starts[:, own],
                time_us=last_us[:, own],
                hidden_us=none,
                left_us=none,
                buckets=[Buckets(buckets.time_us[:, own], buckets.count[:, own])],
            )
            for own in (slice(first, first + self.num_stages) for first in firsts)
        ]
        _, free_us = reduce_early(passes, none, none)
        found: Floats = self.of_stages("reduction") + np.maximum(0.0, free_us)
        return found

    def busy_us(self) -> Floats:
        """Return how long stages work on passes."""
        passes = self.of("forward") + self.of("backward_input") + self.of("backward_weight")
        chunks = self._num_micro_batches * passes - self.of("not_accumulated")
        return self._add_up(chunks + self.of("slowdown"))

    def _add_up(self, of_chunks: Floats) -> Floats:
        """Return the sums over the chunks of every stage: (strategies, stages, cases)."""
        found: Floats = of_chunks.reshape(
            len(of_chunks), -1, self.num_stages, of_chunks.shape[-1]
        ).sum(axis=1)
        return found


def _lines_by_chunk(placed: Sequence[PlacedStages]) -> tuple[Floats, Floats]:
    """Return the lines of chunks: (strategies, chunks, measures, cases).

    Those of layers have the kind of layer after the chunk.
    """
    last = len(placed[0].layers) - 1
    num_stages = len(placed[0].lines)
    positions = [
        ONLY if last == 0 else FIRST if chunk == 0 else LAST if chunk == last else BETWEEN
        for chunk in range(last + 1)
    ]
    stages = [chunk % num_stages for chunk in range(last + 1)]
    constants, per_layer = [], []
    for item in placed:
        lines = [(item.lines[stage], at) for stage, at in zip(stages, positions, strict=True)]
        constants.append([line.constants[at] for line, at in lines])
        per_layer.append([line.per_layer[at] for line, at in lines])
    return np.array(constants), np.array(per_layer)


def time_placed(
    points: Sequence[PlacedStrategy],
    cuts: Sequence[tuple[int, ...]],
    space: PlacementSpace,
    prices: StagePrices,
) -> StepFigures:
    """Return the steps of strategies with the layers of each of their chunks, at these prices."""
    found = StepFigures(
        step_us=np.zeros((len(points), prices.num_cases)),
        bubble_ratio=np.zeros(len(points)),
        exposed_ratio=np.zeros(len(points)),
    )
    layer_kinds = list_layer_kinds(space.scenario.model)
    alike: dict[tuple[int, int, int, str], list[int]] = defaultdict(list)
    for row, point in enumerate(points):
        stages, count = len(point.pipeline.stages), point.num_micro_batches
        alike[stages, point.virtual_stages, count, point.schedule].append(row)
    for (_, _, count, schedule), rows in alike.items():
        placed = []
        for row in rows:
            pipeline, lines = points[row].pipeline, prices.lines_of(points[row].work)
            own = [lines[kind] for kind in pipeline.stages]
            placed.append(
                PlacedStages(
                    lines=[line for line in own if line is not None],
                    layers=count_by_chunk(layer_kinds, cuts[row]),
                    transfers=transfer_times(pipeline, space.kinds, lines),
                )
            )
        figures = time_steps(placed, count, schedule, space.scenario)
        found.step_us[rows], found.bubble_ratio[rows] = figures.step_us, figures.bubble_ratio
        found.exposed_ratio[rows] = figures.exposed_ratio
    return found
