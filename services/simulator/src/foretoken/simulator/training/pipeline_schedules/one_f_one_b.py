"""One forward, one backward: a rank starts a backward pass as soon as it can.

It holds at most as many micro batches as there are ranks after it, itself included.
Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush).
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
    num_ahead = min(num_ranks - 1 - rank, num_micro_batches)
    forward = [(Pass("forward", index, rank),) for index in range(num_micro_batches)]
    backward = [(Pass("backward", index, rank),) for index in range(num_micro_batches)]
    order = forward[:num_ahead]
    for index in range(num_micro_batches - num_ahead):
        order += [forward[num_ahead + index], backward[index]]
    return (*order, *backward[num_micro_batches - num_ahead :])


SCHEDULE = PipelineSchedule(name="one_f_one_b", orders=_orders, limits=takes_all)
