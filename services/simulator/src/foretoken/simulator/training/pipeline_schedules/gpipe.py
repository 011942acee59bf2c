"""All forward passes, then all backward passes: simple, and holds every micro batch at once.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks", 2019.
"""

from foretoken.simulator.training.schedule import PassKind, PipelineSchedule, StageOrder


def _orders(num_stages: int, num_micro_batches: int) -> tuple[StageOrder, ...]:
    order: list[tuple[PassKind, int]] = [("forward", index) for index in range(num_micro_batches)]
    order += [("backward", index) for index in range(num_micro_batches)]
    return (tuple(order),) * num_stages


SCHEDULE = PipelineSchedule(name="gpipe", orders=_orders)
