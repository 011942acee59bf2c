"""Time the passes of one chunk of layers for one micro batch."""

from dataclasses import dataclass

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.steps.chunks import Buckets, ChunkPasses
from foretoken.simulator.steps.passes import time_pass
from foretoken.simulator.steps.program import Column, Duration, StreamRules
from foretoken.simulator.steps.stage_operators import ChunkOperators
from foretoken.simulator.training.operator_prices import OperatorPrices
from foretoken.simulator.training.variability import StepColumns


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedChunk(ChunkPasses):
    """The passes of a chunk, the transfer to the chunk after, and that of the gradients back."""

    send_us: Column
    send_back_us: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRules:
    """What passes are timed by, besides their operators."""

    prices: OperatorPrices
    columns: StepColumns
    trainer: TrainerProfile
    calibration: TrainingCalibration
    splits_backward: bool = False

    def duration(self, rank: int, num_passes: float = 1.0) -> Duration:
        """Return what tells the time of one repetition of an operator on a rank of the pipeline.

        In a step its pass runs `num_passes` times.
        """
        columns, prices = self.columns, self.prices.of_stage(rank)
        slowness = columns.slowness(rank)

        def duration(node: OperatorNode) -> Column:
            time_us = columns.price(prices.find(node))
            if find_operator(node.operator).is_collective:
                name = f"{node.role} {rank}"
                return time_us * columns.congestion(name, num_passes * node.repeat)
            return time_us * slowness

        return duration

    def streams(self, trainer_gap_us: float, calibrated_gap_us: float) -> StreamRules:
        """Return the rules of a pass with these gaps of the host."""
        is_timed = not self.prices.covers_layers
        raw = is_timed * trainer_gap_us
        host_us = is_timed * self.columns.host_us
        return StreamRules(
            gap_us=self.columns.calibrated(raw + calibrated_gap_us, raw),
            slowdown_ratio=self.trainer.overlap_slowdown_ratio,
            launch_us=host_us * self.trainer.launch_us,
            module_call_us=host_us * self.trainer.module_call_us,
            expert_call_us=host_us * self.trainer.expert_call_us,
            expert_hook_us=host_us * self.trainer.expert_hook_us,
            waits_for_counts=is_timed and self.trainer.waits_for_counts,
        )


def time_chunk(
    chunk: ChunkOperators,
    duration: Duration,
    rules: TimingRules,
    far_duration: Duration | None = None,
) -> TimedChunk:
    """Return the times of the passes of a chunk.

    `far_duration` tells those of operators on the hardware of its `far_end`.
    """
    trainer, calibration = rules.trainer, rules.calibration
    host_us = chunk.states.forward_host_us, chunk.states.backward_host_us
    forward = rules.streams(trainer.forward_gap_us + host_us[0], calibration.forward_gap_us)
    backward = rules.streams(trainer.backward_gap_us + host_us[1], calibration.backward_gap_us)
    inputs = weights = None
    if rules.splits_backward:
        inputs = time_pass(chunk.backward_pass("input"), duration, backward)
        weights = time_pass(chunk.backward_pass("weight"), duration, rules.streams(0, 0))
    both = time_pass(chunk.backward_pass(), duration, backward)
    none = rules.columns.constant(0)
    send_us = sum((duration(node) for node in chunk.sends), none)
    send_back_us = sum((duration(node) for node in chunk.sends_back), none)
    if chunk.far_end is not None and far_duration is not None:
        far = chunk.far_end
        send_us = np.maximum(send_us, sum((far_duration(node) for node in far.sends), none))
        send_back_us = np.maximum(
            send_back_us, sum((far_duration(node) for node in far.sends_back), none)
        )
    return TimedChunk(
        forward=time_pass(chunk.forward_pass, duration, forward),
        backward=both,
        backward_input=inputs,
        backward_weight=weights,
        send_us=send_us,
        send_back_us=send_back_us,
        not_accumulated_us=sum(
            (duration(node) * node.repeat for node in _first_sums(chunk, trainer)), none
        ),
        buckets=list_buckets(chunk.states.reduction, duration),
        slowdown_ratio=trainer.overlap_slowdown_ratio,
    )


def list_buckets(reduction: Nodes, duration: Duration) -> list[Buckets]:
    """Return what of a reduction of gradients may overlap the last backward pass."""
    return [
        Buckets(duration(node), node.repeat)
        for node in reduction
        if node.overlap is Overlap.DEFERRED
    ]


def _first_sums(chunk: ChunkOperators, trainer: TrainerProfile) -> Nodes:
    """Return the sums that the first micro batch does without.

    PyTorch takes the first gradients of a parameter as they are; sums kept in a format of their own
    are buffers that every micro batch is added to.
    """
    if trainer.gradient_dtype is not None:
        return ()
    return tuple(node for node in chunk.backward if node.operator == "gradient_accumulation")
