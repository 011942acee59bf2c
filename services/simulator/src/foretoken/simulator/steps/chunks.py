"""The passes of a chunk of layers for one micro batch, and what its gradients wait for at the end.

The last backward pass of a step is slower than the others, for gradients are reduced during it, in
buckets of which each is ready as soon as its share of that pass is done. All times are columns of
cases in µs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foretoken.simulator.grid import Floats
from foretoken.simulator.steps.passes import PassTime
from foretoken.simulator.steps.pipelines.events import ChunkTimes, Time

# Of a rank that has nothing to wait for.
NEVER = -np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """As many collectives of one size, each of `time_us`; numbers may be columns too."""

    time_us: Floats
    count: Any

    @property
    def carried_us(self) -> Floats:
        """Time of all."""
        carried: Floats = self.time_us * self.count
        return carried


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPasses:
    """Times of one micro batch on one chunk.

    `backward` is both halves; a schedule that splits it runs `backward_input` and
    `backward_weight`, which are none elsewhere. The first backward pass of a step takes
    `not_accumulated_us` less, for there is nothing to add its gradients to. `buckets` are reduced
    during the last one.
    """

    forward: PassTime
    backward: PassTime
    backward_input: PassTime | None
    backward_weight: PassTime | None
    not_accumulated_us: Floats
    buckets: Sequence[Buckets]
    slowdown_ratio: float

    @property
    def last_gradients(self) -> PassTime:
        """The pass that ends with the gradients of weights."""
        return self.backward_weight or self.backward

    @property
    def last_gradients_us(self) -> Floats:
        """Time of the last such pass of a step."""
        return self.last_gradients.total_us + self.reduction_slowdown_us

    @property
    def backward_passes(self) -> tuple[PassTime, ...]:
        """The passes that a micro batch is run backward in."""
        halves = (self.backward_input, self.backward_weight)
        return tuple(half for half in halves if half is not None) or (self.backward,)

    @cached_property
    def backward_us(self) -> Floats:
        """Time of all of them."""
        first, *others = (item.total_us for item in self.backward_passes)
        return sum(others, first)

    def of_kind(self, kind: str) -> PassTime:
        """Return the time of a pass by its kind in a schedule."""
        found: PassTime | None = getattr(self, kind)
        return self.backward if found is None else found

    @cached_property
    def num_buckets(self) -> Any:
        """How many collectives reduce gradients during the last pass."""
        return sum(item.count for item in self.buckets)

    @cached_property
    def carried_us(self) -> Floats:
        """Time of all of these."""
        return sum((item.carried_us for item in self.buckets), np.zeros(1))

    @cached_property
    def reduction_slowdown_us(self) -> Floats:
        """What they add to the last pass; the first can begin once its share of that is done."""
        last_us = self.last_gradients.total_us
        if not self.buckets:
            return np.zeros_like(last_us)
        share = 1 - 1 / np.maximum(1, self.num_buckets)
        beside_us = last_us * share * self.slowdown_ratio
        slowed_us: Floats = np.minimum(self.carried_us, beside_us) * (1 - 1 / self.slowdown_ratio)
        return slowed_us

    def times(
        self, send_us: Time, send_back_us: Time, together_us: Mapping[tuple[str, int], Time]
    ) -> ChunkTimes:
        """Return what the pipeline runs the chunk with: what it sends to the next and back.

        `together_us` is its forward pass in one slot with a backward pass, by kind and chunk of it.
        """
        weights_us: Time = 0.0 if self.backward_weight is None else self.backward_weight.total_us
        both_us = self.backward_us
        return ChunkTimes(
            forward_us=self.forward.total_us,
            backward_input_us=self.backward_passes[0].total_us,
            backward_weight_us=weights_us,
            first_backward_us=both_us - self.not_accumulated_us,
            last_backward_us=both_us + self.reduction_slowdown_us,
            send_forward_us=send_us,
            send_backward_us=send_back_us,
            overlapped_us=together_us,
        )


def time_pair(forward: PassTime, backward: PassTime, slowdown_ratio: float) -> Floats:
    """Return the time of a forward and a backward pass that hide each other's communication."""
    compute_us = forward.compute_us + backward.compute_us
    communication_us = forward.communication_us + backward.communication_us
    hidden_us = np.minimum(communication_us, compute_us * slowdown_ratio)
    return np.maximum(compute_us + hidden_us * (1 - 1 / slowdown_ratio), communication_us)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LastPass:
    """The last backward pass of a chunk on its rank, from `start_us` on, with what overlaps it.

    Of its own communication it has `hidden_us`, and `left_us` at its end.
    """

    start_us: Time
    time_us: Floats
    hidden_us: Floats
    left_us: Floats
    buckets: Sequence[Buckets]

    @classmethod
    def of_chunk(
        cls, passes: ChunkPasses, start_us: Time, buckets: Sequence[Buckets]
    ) -> "LastPass":
        """Return the last pass of a chunk that begins then, with what is reduced during it."""
        return cls(
            start_us=start_us,
            time_us=passes.last_gradients_us,
            hidden_us=passes.last_gradients.hidden_us,
            left_us=passes.last_gradients.left_us,
            buckets=buckets,
        )


def reduce_early(passes: Sequence[LastPass], carried_us: Time, none: Floats) -> tuple[Time, Time]:
    """Return when a rank begins and ends to reduce what may overlap with its last passes.

    Both are `NEVER` where nothing does. Passes are in the order in which they begin; `carried_us`
    is all that the rank's communication carries besides its passes in a step, `none` a column of 0.
    What a pass itself reduces goes between the buckets, and the last one after all of it: FSDP2
    sums the shards of a layer over replicas as soon as they are scattered.
    Source: PyTorch, `_composable/fsdp/_fsdp_collectives.py` (foreach_reduce).
    """
    first_us = free_us = late_us = none + NEVER
    for last in passes:
        is_left = last.left_us > 0
        if np.any(is_left):
            # Where passes are too short to hide it, what they leave to each other adds up.
            left_us = np.maximum(last.start_us + last.time_us + last.left_us, carried_us)
            late_us = np.where(is_left, np.maximum(late_us, left_us), late_us)
        num_buckets: Any = sum(item.count for item in last.buckets)
        share_us, done = last.time_us / np.maximum(1, num_buckets), 0
        for item in last.buckets:
            begun_us = np.maximum(free_us, last.start_us + share_us * (done + 1))
            done = done + item.count
            ready_us = last.start_us + share_us * done + item.time_us
            end_us = np.maximum(begun_us + item.carried_us, ready_us)
            is_last = done == num_buckets
            end_us = np.where(is_last, np.maximum(end_us, late_us + item.time_us), end_us)
            first_us = np.where((item.count > 0) & (first_us == NEVER), begun_us, first_us)
            free_us = np.where(item.count > 0, end_us, free_us)
        is_both = (late_us > NEVER) & (num_buckets > 0)
        if np.any(is_both):
            all_us = sum((item.carried_us for item in last.buckets), last.start_us + last.hidden_us)
            free_us = np.where(is_both, np.maximum(free_us, all_us), free_us)
    return first_us, np.maximum(free_us, late_us)


def gather_during(gather_us: Floats, forward_us: Floats, slowdown_ratio: float) -> Floats:
    """Return what gathering parameters adds to a step where they are prefetched.

    They overlap the next step's first forward pass, which they slow down.
    """
    hidden_us = np.minimum(gather_us, forward_us * slowdown_ratio)
    return gather_us - hidden_us + hidden_us * (1 - 1 / slowdown_ratio)
