"""One forward, one backward: a stage starts a backward pass as soon as it can.

It holds at most as many micro batches as there are stages after it, itself included.
Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush).
"""

from foretoken.simulator.training.schedule import PassKind, PipelineSchedule, StageOrder


def _orders(num_stages: int, num_micro_batches: int) -> tuple[StageOrder, ...]:
    return tuple(_order(num_stages - 1 - stage, num_micro_batches) for stage in range(num_stages))


def _order(num_later_stages: int, num_micro_batches: int) -> StageOrder:
    num_ahead = min(num_later_stages, num_micro_batches)
    order: list[tuple[PassKind, int]] = [("forward", index) for index in range(num_ahead)]
    for index in range(num_micro_batches - num_ahead):
        order += [("forward", num_ahead + index), ("backward", index)]
    order += [
        ("backward", index) for index in range(num_micro_batches - num_ahead, num_micro_batches)
    ]
    return tuple(order)


SCHEDULE = PipelineSchedule(name="one_f_one_b", orders=_orders)
