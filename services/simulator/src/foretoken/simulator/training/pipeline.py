"""Run a pipeline schedule event by event, with transfers that both ends must be ready for.

A stage sends and receives in the order of its passes. What it exchanges with one neighbour between
two passes travels together, both ways at once, as Megatron-LM's batched sends and receives do; a
transfer begins when both ends have arrived and holds both until it ends.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.training.schedule import PassKind, StageOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Times of one micro batch on one stage, in µs.

    `send_forward_us` carries activations to the next stage, `send_backward_us` gradients to the
    one before; 0 where there is none.
    """

    forward_us: float
    backward_us: float
    send_forward_us: float = 0.0
    send_backward_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """What a stage did from when to when, in µs; a transfer belongs to its sender.

    `kind` is `forward`, `backward`, `send_forward` or `send_backward`.
    """

    stage: int
    micro_batch: int
    kind: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """Outcome of a schedule: all spans, and per stage the end and the time spent in transfers."""

    spans: tuple[Span, ...]
    stage_ends_us: tuple[float, ...]
    transfers_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The output of one pass on its way from `source` to the neighbour that needs it."""

    kind: PassKind
    micro_batch: int
    source: int

    @property
    def target(self) -> int:
        return self.source + (1 if self.kind == "forward" else -1)

    def peer_of(self, stage: int) -> int:
        return self.target if stage == self.source else self.source


@dataclass(frozen=True, slots=True)
class _Pass:
    kind: PassKind
    micro_batch: int


# What goes between two neighbours at one time.
_Exchange = tuple[_Transfer, ...]
# What a stage works through: passes, and the exchanges between them.
_Program = list[_Pass | _Exchange]


def run_pipeline(
    orders: Sequence[StageOrder], times: Sequence[StageTimes], *, has_duplex_links: bool = True
) -> PipelineRun:
    """Run the orders of a schedule with the times of its stages.

    Without `has_duplex_links` the two directions of an exchange follow each other, the gradient
    first, as DeepSpeed's blocking sends and receives do.

    Raises:
        InvalidRequestError: the schedule's stages wait for each other for ever.

    """
    return _Pipeline(orders, times, has_duplex_links).run()


class _Pipeline:
    """The clocks of all stages, and who has arrived at which transfer."""

    def __init__(
        self, orders: Sequence[StageOrder], times: Sequence[StageTimes], has_duplex_links: bool
    ) -> None:
        self._times = times
        self._has_duplex_links = has_duplex_links
        self._programs = [_program(order, i, len(orders)) for i, order in enumerate(orders)]
        self._next = [0] * len(orders)
        self._clocks = [0.0] * len(orders)
        self._transfers = [0.0] * len(orders)
        self._arrivals: dict[tuple[_Transfer, int], float] = {}
        self._spans: list[Span] = []

    def run(self) -> PipelineRun:
        """Advance the stages, each as far as it can, until all are done."""
        ready = deque(range(len(self._programs)))
        while ready:
            stage = ready.popleft()
            while self._advance(stage, ready):
                pass
        if any(done < len(self._programs[stage]) for stage, done in enumerate(self._next)):
            raise InvalidRequestError.of_field(
                "pipeline_schedule", "its stages wait for each other for ever"
            )
        self._spans.sort(key=lambda span: (span.stage, span.start_us))
        return PipelineRun(tuple(self._spans), tuple(self._clocks), tuple(self._transfers))

    def _advance(self, stage: int, ready: deque[int]) -> bool:
        """Take the stage's next action if it can be completed; wake neighbours that it frees."""
        if self._next[stage] == len(self._programs[stage]):
            return False
        action = self._programs[stage][self._next[stage]]
        if isinstance(action, _Pass):
            self._compute(stage, action)
        elif not self._exchange(stage, action, ready):
            return False
        self._next[stage] += 1
        return True

    def _compute(self, stage: int, action: _Pass) -> None:
        times = self._times[stage]
        start = self._clocks[stage]
        duration = times.forward_us if action.kind == "forward" else times.backward_us
        self._clocks[stage] = start + duration
        self._spans.append(Span(stage, action.micro_batch, action.kind, start, self._clocks[stage]))

    def _exchange(self, stage: int, transfers: _Exchange, ready: deque[int]) -> bool:
        """Complete an exchange; False, once announced, while the neighbour has not arrived."""
        peer = transfers[0].peer_of(stage)
        clock = self._clocks[stage]
        starts: list[tuple[float, _Transfer]] = []
        for transfer in transfers:
            if (transfer, stage) not in self._arrivals:
                self._arrivals[transfer, stage] = clock
                ready.append(peer)
            if (transfer, peer) in self._arrivals:
                starts.append((max(clock, self._arrivals[transfer, peer]), transfer))
        if len(starts) < len(transfers):
            return False
        self._clocks[stage] = self._carry(stage, starts)
        return True

    def _carry(self, stage: int, starts: list[tuple[float, _Transfer]]) -> float:
        """Let the transfers of an exchange happen; return when the last has ended."""
        starts.sort(key=lambda item: (item[0], item[1].kind))  # of two at once, the gradient
        free = 0.0
        for earliest, transfer in starts:
            start = earliest if self._has_duplex_links else max(earliest, free)
            end = start + self._duration(transfer)
            self._transfers[stage] += max(0.0, end - max(start, free))
            free = max(free, end)
            if transfer.source == stage and end > start:
                kind = f"send_{transfer.kind}"
                self._spans.append(Span(stage, transfer.micro_batch, kind, start, end))
        return free

    def _duration(self, transfer: _Transfer) -> float:
        times = self._times[transfer.source]
        return times.send_forward_us if transfer.kind == "forward" else times.send_backward_us


def _program(order: StageOrder, stage: int, num_stages: int) -> _Program:
    """Return the passes of a stage with the exchanges they need before and after."""
    program: _Program = []
    exchange: list[_Transfer] = []

    def flush() -> None:
        if exchange:
            program.append(tuple(exchange))
            exchange.clear()

    def add(transfer: _Transfer) -> None:
        if not (0 <= transfer.source < num_stages and 0 <= transfer.target < num_stages):
            return
        if exchange and exchange[-1].peer_of(stage) != transfer.peer_of(stage):
            flush()
        exchange.append(transfer)

    for kind, micro_batch in order:
        add(_Transfer(kind, micro_batch, stage - 1 if kind == "forward" else stage + 1))
        flush()
        program.append(_Pass(kind, micro_batch))
        add(_Transfer(kind, micro_batch, stage))
    flush()
    return program
