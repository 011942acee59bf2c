"""What a scheduler decides and what a step costs: the contracts between a replica's parts."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest


class StepBudget(NamedTuple):
    """Most tokens a step may compute, most requests that may run after it is scheduled.

    `num_in_flight` requests are in a pipeline with their blocks: they cannot be preempted now.
    """

    num_tokens: int
    num_seqs: int
    num_in_flight: int = 0


class Batch:
    """The work of one serving step.

    `decodes` compute one token each; `prefills` are (request, tokens) with more work or without
    context; `preempted` requests lost their KV blocks and wait again.
    """

    __slots__ = ("decodes", "num_tokens", "preempted", "prefills")

    def __init__(self) -> None:
        self.decodes: list[SimRequest] = []
        self.prefills: list[tuple[SimRequest, int]] = []
        self.preempted: list[SimRequest] = []
        self.num_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether no request was scheduled."""
        return self.num_tokens == 0

    def add(self, request: SimRequest, num_tokens: int) -> None:
        """Schedule that many tokens of a request."""
        self.num_tokens += num_tokens
        if request.num_uncomputed == 1 and request.num_computed > 0:
            self.decodes.append(request)
        else:
            self.prefills.append((request, num_tokens))

    def preempt(self, request: SimRequest, kv: KvCache) -> None:
        """Take a running request's blocks; it will compute everything again."""
        kv.free(request)
        request.restart()
        self.preempted.append(request)


class Scheduler(Protocol):
    """The rules of an engine.

    `select` moves requests between `running` and `waiting`, allocates their blocks and returns the
    batch. It is a function of what it is given: a replica does not ask again as long as every
    running request decodes, nothing arrives or finishes, and free blocks suffice.
    """

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""


class StepShape(NamedTuple):
    """What the cost of a step depends on.

    `num_rows` sequences get a token. `prefills` are (new tokens, context before them);
    `decode_kv_tokens` and `decode_kv_tokens_max` count the context with the new token.
    """

    num_tokens: int
    num_rows: int
    num_decodes: int
    decode_kv_tokens: int
    decode_kv_tokens_max: int
    prefills: tuple[tuple[int, int], ...] = ()


class StepCost(Protocol):
    """How long steps take on one replica."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the replica."""

    def stage_us(self, shape: StepShape) -> Sequence[float]:
        """Return the time of a step on each stage, in µs."""

    def decode_us(self, num_decodes: int, kv_tokens: int, kv_tokens_max: int) -> float:
        """Return the time on the first stage of a step that only decodes, in µs."""
