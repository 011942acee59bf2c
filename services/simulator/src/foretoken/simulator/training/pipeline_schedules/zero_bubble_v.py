"""Zero bubble V: two chunks per rank, folded, so that the first rank has also the last layers.

The first backward pass needs no way back, and weight gradients fill what idle time is left. Where
forward, input and weight gradient take equally long, a step of at least two micro batches per rank
idles for one pass of a chunk per rank, where 1F1B idles for six. No rank holds more than the first
one of 1F1B.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with
Controllable Memory", 2024 (ZB-V). The papers search for an order by heuristics; this one is regular
(it is DualPipe folded in the middle, with all backward passes split), so it does not suffer where
the passes differ.
"""

from collections import deque
from itertools import count

from foretoken.simulator.steps.pipelines.schedule import (
    Pass,
    PipelineSchedule,
    RankOrder,
    takes_all,
)


def _orders(num_ranks: int, num_micro_batches: int, _: int) -> tuple[RankOrder, ...]:
    # Fewer micro batches are an order for two per rank with passes left out.
    num_planned = max(num_micro_batches, 2 * num_ranks)
    orders = (_Rank(rank, num_ranks, num_planned).order() for rank in range(num_ranks))
    return tuple(
        tuple((item,) for item in order if item.micro_batch < num_micro_batches) for order in orders
    )


class _Rank:
    """The order of one rank, phase by phase; `height` counts the ranks to the fold."""

    def __init__(self, rank: int, num_ranks: int, num_micro_batches: int) -> None:
        self._height = num_ranks - 1 - rank
        self._num_held = rank + 1
        self._num_regular = num_micro_batches - 2 * num_ranks + rank + 1
        self._early, self._late = _Chunk(rank), _Chunk(2 * num_ranks - 1 - rank)
        self._passes: list[Pass] = []
        self._weights: deque[Pass] = deque()

    def order(self) -> list[Pass]:
        """Return all passes of a step."""
        self._fill()
        for _ in range(self._num_regular):
            self._backward(self._late)
            self._passes.append(self._early.forward())
            self._backward(self._early)
            self._passes.append(self._late.forward())
        self._drain()
        return self._passes

    def _fill(self) -> None:
        """Forward passes until the fold, then until the first gradient, while both come in turn."""
        for _ in range(2 * self._height):
            self._passes.append(self._early.forward())
        for _ in range(self._num_held):
            self._passes += [self._early.forward(), self._late.forward()]
        for _ in range(self._height):
            self._backward(self._late)
            self._passes.append(self._late.forward())

    def _drain(self) -> None:
        """Backward passes; the last ones put off their weight gradients to fill the end."""
        for _ in range(self._height):
            self._backward(self._late)
            self._passes.append(self._late.forward())
            self._backward(self._early)
        for index in range(2 * self._num_held):
            chunk = self._early if index % 2 else self._late
            self._backward(chunk, puts_off=index >= self._num_held)
        for _ in range(self._height):
            self._passes.append(self._weights.popleft())
            self._backward(self._early, puts_off=True)
        self._passes += self._weights

    def _backward(self, chunk: "_Chunk", *, puts_off: bool = False) -> None:
        item = chunk.backward()
        self._passes.append(item)
        self._weights.append(Pass("backward_weight", item.micro_batch, item.chunk))
        if not puts_off:
            self._passes.append(self._weights.popleft())


class _Chunk:
    """The passes of one chunk, micro batch by micro batch."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._forward = count()
        self._backward = count()

    def forward(self) -> Pass:
        """Return the next forward pass."""
        return Pass("forward", next(self._forward), self._chunk)

    def backward(self) -> Pass:
        """Return the next input gradient."""
        return Pass("backward_input", next(self._backward), self._chunk)


SCHEDULE = PipelineSchedule(
    name="zero_bubble_v", orders=_orders, virtual_stages=2, splits_backward=True, limits=takes_all
)
