"""Time of a step in closed form, for strategies of as many stages and micro batches at once.

The passes are bounded by the formula of their schedule. Then every rank reduces its gradients, from
the end of its own passes on, as far as that was not hidden beside the last of them; all update when
the last one has reduced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.training_truth import TrainingCalibration
from foretoken.simulator.search.placement.cutting import BETWEEN, FIRST, LAST, ONLY
from foretoken.simulator.search.placement.stage_cost import (
    MEASURES,
    NUM_BOUNDS,
    Numbers,
    StageLines,
)
from foretoken.simulator.training.closed_form import PipelineShape, bound_pipeline_us
from foretoken.simulator.training.pipeline import ChunkTimes, LinkRules


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStages:
    """The stages of one strategy: the lines of each, its layers, and what they send.

    `transfers` is (forward and back, stages, bounds).
    """

    lines: Sequence[StageLines]
    layers: Sequence[int]
    transfers: Numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepFigures:
    """Steps of strategies: `step_us` is (strategies, bounds), the ratios (strategies)."""

    step_us: Numbers
    bubble_ratio: Numbers
    exposed_ratio: Numbers


def time_steps(
    placed: Sequence[PlacedStages],
    num_micro_batches: int,
    schedule: str,
    scenario: TrainingScenario,
) -> StepFigures:
    """Return the steps of strategies of one number of stages and one of micro batches."""
    times = _StageTimes(placed)
    trainer = scenario.trainer.resolve()
    calibration = scenario.calibration or TrainingCalibration()
    shape = PipelineShape(
        chunk_times=times.chunk_times(),
        num_ranks=times.num_stages,
        num_micro_batches=num_micro_batches,
        rules=LinkRules(transfers=trainer.transfers, has_duplex_links=trainer.has_duplex_links),
    )
    passes_us = np.asarray(bound_pipeline_us(schedule, shape)).reshape(len(placed), NUM_BOUNDS)
    reduced_us = passes_us[:, None] - times.way_out_us() + times.left_us()
    end_us = times.of("check") + times.of("update") + times.of("gather")
    step_us = reduced_us.max(axis=1) + end_us.max(axis=1)
    step_us = step_us + trainer.step_gap_us + calibration.step_gap_us
    busy_us = times.busy_us(num_micro_batches) + times.left_us() + end_us
    exposed_us = num_micro_batches * times.of("exposed") + times.left_us() + times.of("gather")
    critical = busy_us[:, :, 0].argmax(axis=1)[:, None]
    exposed_us = np.take_along_axis(exposed_us[:, :, 0], critical, axis=1)[:, 0]
    return StepFigures(
        step_us=step_us * calibration.step_factor,
        bubble_ratio=np.maximum(0.0, 1 - busy_us[:, :, 0].mean(axis=1) / step_us[:, 0]),
        exposed_ratio=np.minimum(1.0, exposed_us / step_us[:, 0]),
    )


class _StageTimes:
    """The measures of all stages: (strategies, stages, bounds)."""

    def __init__(self, placed: Sequence[PlacedStages]) -> None:
        self.num_stages = len(placed[0].layers)
        constants, per_layer = _lines_by_position(placed)
        layers = np.array([item.layers for item in placed])[:, :, None, None]
        self._values = np.maximum(0.0, constants + layers * per_layer)
        self._transfers = np.array([item.transfers for item in placed])

    def of(self, name: str) -> Numbers:
        """Return a measure."""
        found: Numbers = self._values[:, :, MEASURES.index(name)]
        return found

    def chunk_times(self) -> list[ChunkTimes]:
        """Return what the formulas take: columns over strategies and bounds."""
        forward, inputs, weights = (
            self.of(name) for name in ("forward", "backward_input", "backward_weight")
        )
        both = inputs + weights
        first, last = both - self.of("not_accumulated"), both + self.of("slowdown")
        send, back = self._transfers[:, 0], self._transfers[:, 1]
        none = np.zeros_like(send[:, 0])
        return [
            ChunkTimes(
                forward_us=forward[:, stage].ravel(),
                backward_input_us=inputs[:, stage].ravel(),
                backward_weight_us=weights[:, stage].ravel(),
                first_backward_us=first[:, stage].ravel(),
                last_backward_us=last[:, stage].ravel(),
                send_forward_us=send[:, stage].ravel(),
                send_backward_us=(back[:, stage - 1] if stage else none).ravel(),
            )
            for stage in range(self.num_stages)
        ]

    def way_out_us(self) -> Numbers:
        """Return how long the ranks before one go on when it has done its last pass."""
        passes = self.of("backward_input") + self._transfers[:, 1]
        before: Numbers = np.cumsum(passes, axis=1) - passes
        return before

    def left_us(self) -> Numbers:
        """Return what of its reductions a rank waits for when its passes have ended.

        Buckets are ready one after the other over the last backward pass.
        """
        deferred, buckets = self.of("deferred"), np.maximum(1.0, self.of("buckets"))
        pass_us = self.of("backward_input") + self.of("backward_weight")
        queued_us = deferred + pass_us / buckets - pass_us
        beside = np.where(deferred > 0, np.maximum(deferred / buckets, queued_us), 0.0)
        found: Numbers = self.of("reduction") + np.maximum(0.0, beside)
        return found

    def busy_us(self, num_micro_batches: int) -> Numbers:
        """Return how long ranks work on passes."""
        passes = self.of("forward") + self.of("backward_input") + self.of("backward_weight")
        return num_micro_batches * passes - self.of("not_accumulated") + self.of("slowdown")


def _lines_by_position(placed: Sequence[PlacedStages]) -> tuple[Numbers, Numbers]:
    """Return the lines of stages: (strategies, stages, measures, bounds) each."""
    last = len(placed[0].layers) - 1
    constants, per_layer = [], []
    for item in placed:
        positions = [
            ONLY if last == 0 else FIRST if stage == 0 else LAST if stage == last else BETWEEN
            for stage in range(last + 1)
        ]
        placed_lines = list(zip(item.lines, positions, strict=True))
        constants.append([line.constants[position] for line, position in placed_lines])
        per_layer.append([line.per_layer[position] for line, position in placed_lines])
    return np.array(constants), np.array(per_layer)
