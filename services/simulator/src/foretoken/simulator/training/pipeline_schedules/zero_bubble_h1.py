"""Zero bubble H1: 1F1B whose weight gradients wait until there is nothing better to do.

A rank holds no more micro batches than the first rank of 1F1B: the later a rank is in the pipeline,
the fewer forward passes it is ahead and the more weight gradients it puts off, to fill the end.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (ZB-H1).
"""

from foretoken.simulator.steps.pipelines.schedule import (
    Pass,
    PipelineSchedule,
    RankOrder,
    takes_all,
)


def _orders(num_ranks: int, num_micro_batches: int, _: int) -> tuple[RankOrder, ...]:
    return tuple(_order(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))


def _order(rank: int, num_ranks: int, num_micro_batches: int) -> RankOrder:
    """Return the order of a rank; step i has forward i + ahead, input i and weight i - rank."""
    num_ahead = num_ranks - 1 - rank
    order: list[tuple[Pass]] = []
    for step in range(-num_ahead, num_micro_batches + rank):
        forward, weight = step + num_ahead, step - rank
        if forward < num_micro_batches:
            order.append((Pass("forward", forward, rank),))
        if 0 <= step < num_micro_batches:
            order.append((Pass("backward_input", step, rank),))
        if 0 <= weight < num_micro_batches:
            order.append((Pass("backward_weight", weight, rank),))
    return tuple(order)


SCHEDULE = PipelineSchedule(
    name="zero_bubble_h1", orders=_orders, splits_backward=True, limits=takes_all
)
