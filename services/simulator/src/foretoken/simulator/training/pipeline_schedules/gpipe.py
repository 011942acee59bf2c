"""All forward passes, then all backward passes: simple, and holds every micro batch at once.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks", 2019.
"""

from foretoken.simulator.steps.pipelines.schedule import (
    Pass,
    PipelineSchedule,
    RankOrder,
    takes_all,
)


def _orders(num_ranks: int, num_micro_batches: int, _: int) -> tuple[RankOrder, ...]:
    return tuple(_order(rank, num_micro_batches) for rank in range(num_ranks))


def _order(rank: int, num_micro_batches: int) -> RankOrder:
    forward = [(Pass("forward", index, rank),) for index in range(num_micro_batches)]
    backward = [(Pass("backward", index, rank),) for index in range(num_micro_batches)]
    return (*forward, *backward)


SCHEDULE = PipelineSchedule(name="gpipe", orders=_orders, limits=takes_all)
