"""DualPipe: micro batches enter at both ends, and passes of both directions hide each other.

A rank holds two chunks, the one of its place and that of its mirror image: the first half of the
micro batches go from the first rank to the last, the second half the other way. Where a forward
pass of one direction meets a backward pass of the other they run in one slot, each computing while
the other communicates. Every chunk is held by two ranks, so parameters are there twice.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 and figure 5.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from foretoken.domain.requests.limit import Limit, check_limits
from foretoken.domain.units import Quantity
from foretoken.simulator.steps.pipelines.schedule import Pass, PassKind, PipelineSchedule, RankOrder


def _limits(num_ranks: Quantity, num_micro_batches: Quantity, _chunks: Quantity) -> Iterator[Limit]:
    yield Limit(
        "layout.pp", num_ranks % 2 != 0, lambda: f"dualpipe needs an even pp, not {num_ranks}"
    )
    is_odd_or_few = (num_micro_batches % 2 != 0) | (num_micro_batches < 2 * num_ranks)
    yield Limit(
        "num_micro_batches",
        (num_ranks % 2 == 0) & is_odd_or_few,
        lambda: f"dualpipe needs an even number, at least {2 * num_ranks}, not {num_micro_batches}",
    )


def _orders(num_ranks: int, num_micro_batches: int, _: int) -> tuple[RankOrder, ...]:
    check_limits(_limits(num_ranks, num_micro_batches, 1))
    return tuple(_Rank(rank, num_ranks, num_micro_batches).order() for rank in range(num_ranks))


class _Rank:
    """The order of one rank, phase by phase.

    `near` micro batches enter at the end of the pipeline this rank is closer to, `far` ones at the
    other. `depth` counts the ranks to the near end, `height` those to the middle.
    """

    def __init__(self, rank: int, num_ranks: int, num_micro_batches: int) -> None:
        mirrored = num_ranks - 1 - rank
        self._depth = min(rank, mirrored)
        self._height = num_ranks // 2 - 1 - self._depth
        self._num_paired = num_micro_batches // 2 - num_ranks + self._depth + 1
        half = num_micro_batches // 2
        upwards, downwards = (rank, 0), (mirrored, half)  # chunk, its first micro batch
        ends = (upwards, downwards) if rank < mirrored else (downwards, upwards)
        self._near, self._far = (_Direction(*end) for end in ends)
        self._slots: list[tuple[Pass, ...]] = []
        self._weights: deque[Pass] = deque()

    def order(self) -> RankOrder:
        """Return all slots of a step."""
        self._fill()
        self._meet()
        self._drain()
        return tuple(self._slots)

    def _fill(self) -> None:
        """Forward passes until micro batches of the other direction come back."""
        for _ in range(2 * self._height):
            self._run(self._near.forward())
        for _ in range(self._depth + 1):
            self._run(self._near.forward())
            self._run(self._far.forward())
        for _ in range(self._height):
            self._run(self._split(self._far))
            self._run(self._weights.popleft())
            self._run(self._far.forward())

    def _meet(self) -> None:
        """Forward and backward passes of opposite directions in one slot."""
        for index in range(self._num_paired):
            if index == 0 and self._height == 0:
                # The middle ranks make this forward pass's output for each other first.
                self._run(self._near.forward())
                self._run(self._far.backward())
            else:
                self._run(self._near.forward(), self._far.backward())
            self._run(self._far.forward(), self._near.backward())

    def _drain(self) -> None:
        """Backward passes; the last ones put off their weight gradients to fill the end."""
        for _ in range(self._height):
            self._run(self._far.backward())
            self._run(self._far.forward(), self._near.backward())
        num_left = self._depth + 1
        for index in range(2 * num_left):
            direction = self._near if index % 2 else self._far
            is_split = index >= num_left
            self._run(self._split(direction) if is_split else direction.backward())
        for _ in range(self._height):
            self._run(self._weights.popleft())
            self._run(self._split(self._near))
        while self._weights:
            self._run(self._weights.popleft())

    def _run(self, *passes: Pass) -> None:
        self._slots.append(passes)

    def _split(self, direction: "_Direction") -> Pass:
        """Return the input half of a backward pass, and keep the weight half."""
        item = direction.backward("backward_input")
        self._weights.append(Pass("backward_weight", item.micro_batch, item.chunk))
        return item


class _Direction:
    """The passes of one direction on one rank."""

    def __init__(self, chunk: int, first_micro_batch: int) -> None:
        self._chunk = chunk
        self._forward = count(first_micro_batch)
        self._backward = count(first_micro_batch)

    def forward(self) -> Pass:
        """Return the next forward pass."""
        return Pass("forward", next(self._forward), self._chunk)

    def backward(self, kind: PassKind = "backward") -> Pass:
        """Return the next backward pass."""
        return Pass(kind, next(self._backward), self._chunk)


SCHEDULE = PipelineSchedule(name="dualpipe", orders=_orders, splits_backward=True, limits=_limits)
