"""Interleaved 1F1B: a rank holds several chunks of layers, and the pipeline goes round them.

The bubble shrinks by the number of chunks per rank, for more micro batches in flight and more
transfers, from the last rank back to the first too. Micro batches go in groups of as many as there
are ranks: one group through a chunk, then through the rank's next.
Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021.
"""

from collections.abc import Iterator

from foretoken.domain.requests.limit import Limit, check_limits
from foretoken.domain.units import Quantity
from foretoken.simulator.steps.pipelines.schedule import Pass, PassKind, PipelineSchedule, RankOrder


def _limits(
    num_ranks: Quantity, num_micro_batches: Quantity, virtual_stages: Quantity
) -> Iterator[Limit]:
    yield Limit(
        "num_micro_batches",
        (virtual_stages > 1) & (num_micro_batches % num_ranks != 0),
        lambda: (
            f"interleaved runs groups of pp ({num_ranks}) micro batches, not {num_micro_batches}"
        ),
    )


def _orders(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> tuple[RankOrder, ...]:
    check_limits(_limits(num_ranks, num_micro_batches, virtual_stages))
    grid = _Grid(num_ranks, num_micro_batches, virtual_stages)
    return tuple(grid.order(rank) for rank in range(num_ranks))


class _Grid:
    """Micro batches times chunks, in the order in which a rank goes through them."""

    def __init__(self, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> None:
        self._num_ranks = num_ranks
        self._virtual_stages = virtual_stages
        self._num_passes = num_micro_batches * virtual_stages

    def order(self, rank: int) -> RankOrder:
        """Return the order of a rank: forward passes ahead, then one of each in turn."""
        later = self._num_ranks - 1 - rank
        num_ahead = later
        if self._virtual_stages > 1:
            num_ahead = 2 * later + (self._virtual_stages - 1) * self._num_ranks
        num_ahead = min(num_ahead, self._num_passes)
        forward = [self._pass("forward", index, rank) for index in range(self._num_passes)]
        backward = [self._pass("backward", index, rank) for index in range(self._num_passes)]
        order = forward[:num_ahead]
        for index in range(self._num_passes - num_ahead):
            order += [forward[num_ahead + index], backward[index]]
        return (*order, *backward[self._num_passes - num_ahead :])

    def _pass(self, kind: PassKind, index: int, rank: int) -> tuple[Pass]:
        group_size = self._num_ranks * self._virtual_stages
        group, place = divmod(index, group_size)
        turn = place // self._num_ranks
        if kind == "backward":
            turn = self._virtual_stages - 1 - turn
        micro_batch = group * self._num_ranks + place % self._num_ranks
        return (Pass(kind, micro_batch, turn * self._num_ranks + rank),)


SCHEDULE = PipelineSchedule(name="interleaved", orders=_orders, virtual_stages=0, limits=_limits)
