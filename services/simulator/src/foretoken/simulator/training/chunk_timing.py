"""Time the passes of one chunk of layers for one micro batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.domain.graph import OperatorNode, Overlap
from foretoken.domain.lowering_options import Nodes
from foretoken.domain.operator import find_operator
from foretoken.domain.trainer import TrainerProfile
from foretoken.domain.training_truth import TrainingCalibration
from foretoken.simulator.steps.passes import PassTime, time_pass
from foretoken.simulator.steps.program import Column, Duration, StreamRules
from foretoken.simulator.training.operator_prices import OperatorPrices
from foretoken.simulator.training.pipeline import ChunkTimes
from foretoken.simulator.training.stage_operators import ChunkOperators
from foretoken.simulator.training.variability import StepColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPasses:
    """Times of one micro batch on one chunk.

    `backward` is both halves; a schedule that splits it runs `backward_input` and
    `backward_weight`, which are none elsewhere. The first backward pass of a step takes
    `not_accumulated_us` less, for there is nothing to add its gradients to, and the last one
    `reduction_slowdown_us` more, while gradients are reduced beside it. `send_us` is the transfer
    to the chunk after, `send_back_us` that of the gradients it returns.
    """

    forward: PassTime
    backward: PassTime
    backward_input: PassTime | None
    backward_weight: PassTime | None
    send_us: Column
    send_back_us: Column
    not_accumulated_us: Column
    reduction_slowdown_us: Column

    @property
    def last_gradients(self) -> PassTime:
        """The pass that ends with the gradients of weights."""
        return self.backward_weight or self.backward

    @property
    def last_gradients_us(self) -> Column:
        """Time of the last such pass of a step."""
        return self.last_gradients.total_us + self.reduction_slowdown_us

    def of_kind(self, kind: str) -> PassTime:
        """Return the time of a pass by its kind in a schedule."""
        found: PassTime | None = getattr(self, kind)
        return self.backward if found is None else found


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRules:
    """What passes are timed by, beside their operators."""

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
        raw = 0.0 if self.prices.covers_layers else trainer_gap_us
        return StreamRules(
            gap_us=self.columns.calibrated(raw + calibrated_gap_us, raw),
            slowdown_ratio=self.trainer.overlap_slowdown_ratio,
            launch_us=0.0 if self.prices.covers_layers else self.trainer.launch_us,
        )


def time_chunk(
    chunk: ChunkOperators,
    duration: Duration,
    rules: TimingRules,
    far_duration: Duration | None = None,
) -> ChunkPasses:
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
    return ChunkPasses(
        forward=time_pass(chunk.forward_pass, duration, forward),
        backward=both,
        backward_input=inputs,
        backward_weight=weights,
        send_us=send_us,
        send_back_us=send_back_us,
        not_accumulated_us=sum(
            (duration(node) * node.repeat for node in _first_sums(chunk, trainer)), none
        ),
        reduction_slowdown_us=_reduction_slowdown(chunk, duration, weights or both, trainer),
    )


def chunk_times(
    passes: ChunkPasses,
    before: ChunkPasses | None,
    together_us: Mapping[tuple[str, int], Column],
) -> ChunkTimes:
    """Return what the pipeline runs a chunk with; gradients go to the chunk `before`.

    `together_us` is its forward pass in one slot with a backward pass, by kind and chunk of that.
    """
    inputs, weights = passes.backward_input or passes.backward, passes.backward_weight
    weights_us = 0.0 if weights is None else weights.total_us
    both_us = inputs.total_us + weights_us
    return ChunkTimes(
        forward_us=passes.forward.total_us,
        backward_input_us=inputs.total_us,
        backward_weight_us=weights_us,
        first_backward_us=both_us - passes.not_accumulated_us,
        last_backward_us=both_us + passes.reduction_slowdown_us,
        send_forward_us=passes.send_us,
        send_backward_us=0.0 if before is None else before.send_back_us,
        overlapped_us=together_us,
    )


def _first_sums(chunk: ChunkOperators, trainer: TrainerProfile) -> Nodes:
    """Return the sums that the first micro batch does without.

    PyTorch takes the first gradients of a parameter as they are; sums kept in a format of their own
    are buffers that every micro batch is added to.
    """
    if trainer.gradient_dtype is not None:
        return ()
    return tuple(node for node in chunk.backward if node.operator == "gradient_accumulation")


def _reduction_slowdown(
    chunk: ChunkOperators, duration: Duration, last: PassTime, trainer: TrainerProfile
) -> Column:
    """Return what buckets add to the last pass, beside which they are reduced.

    The first can begin once its share of the pass is done.
    """
    buckets = [node for node in chunk.states.reduction if node.overlap is Overlap.DEFERRED]
    num_buckets = sum(node.repeat for node in buckets)
    none = 0 * last.total_us
    if not num_buckets:
        return none
    carried_us = sum((duration(node) * node.repeat for node in buckets), none)
    beside_us = last.total_us * (1 - 1 / num_buckets) * trainer.overlap_slowdown_ratio
    return np.minimum(carried_us, beside_us) * (1 - 1 / trainer.overlap_slowdown_ratio)


def time_pair(forward: PassTime, backward: PassTime, slowdown_ratio: float) -> Column:
    """Return the time of a forward and a backward pass that hide each other's communication."""
    compute_us = forward.compute_us + backward.compute_us
    communication_us = forward.communication_us + backward.communication_us
    hidden_us = np.minimum(communication_us, compute_us * slowdown_ratio)
    return np.maximum(compute_us + hidden_us * (1 - 1 / slowdown_ratio), communication_us)
