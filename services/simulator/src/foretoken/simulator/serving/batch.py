"""The work of a step, and what a scheduler may do to put it together."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from foretoken.domain.engine import EngineProfile
from foretoken.simulator.cost_tables import StepShape
from foretoken.simulator.serving.kv_cache import KvCache, Prefix
from foretoken.simulator.serving.record import NOT_REACHED
from foretoken.simulator.serving.request import SimRequest


class StepBudget(NamedTuple):
    """What a batch is chosen for: the engine's rules, the number of its step, the time in ns."""

    rules: EngineProfile
    step: int = 0
    now_ns: int = 0


class Batch:
    """The work of one step of an engine.

    `decodes` are the contexts, with the new tokens, of requests that compute one token, and those
    proposed after it; `prefills` are (request, tokens, context before them) of those with more work
    or without context; `rows` are the requests that get tokens, `yields` how many each; `num_rows`
    tokens are sampled from. `preempted` lost their blocks and wait again.
    """

    def __init__(self, budget: StepBudget, kv: KvCache) -> None:
        self.budget = budget
        self.kv = kv
        self.num_tokens = self.num_rows = 0
        self.decodes: list[int] = []
        self.prefills: list[tuple[SimRequest, int, int]] = []
        self.rows: list[SimRequest] = []
        self.yields: list[int] = []
        self.preempted: list[SimRequest] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request was scheduled."""
        return self.num_tokens == 0

    @property
    def num_seqs(self) -> int:
        """Requests that are scheduled."""
        return len(self.decodes) + len(self.prefills)

    @property
    def shape(self) -> StepShape:
        """What the cost of the step depends on, beside its prefills."""
        return StepShape(
            num_tokens=self.num_tokens,
            num_rows=self.num_rows,
            num_decodes=len(self.decodes),
            decode_kv_tokens=sum(self.decodes),
            decode_kv_tokens_max=max(self.decodes, default=0),
            num_prefills=len(self.prefills),
        )

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may be added."""
        return self.budget.rules.max_num_batched_tokens - self.num_tokens

    @property
    def can_prefill(self) -> bool:
        """Whether another prompt may be computed in this step."""
        most = self.budget.rules.max_num_prefills
        return most == 0 or len(self.prefills) < most

    def limit_piece(self, num_tokens: int) -> int:
        """Return how many of a request's uncomputed tokens this step may compute."""
        limit = self.budget.rules.max_chunk_tokens
        if 0 < limit < num_tokens:
            num_tokens = limit
        return min(num_tokens, self.num_tokens_left)

    def can_schedule(self, request: SimRequest) -> bool:
        """Whether a request wants another token, and what that needs is known and loaded.

        A synchronous engine has to see a token before it can schedule the next.
        """
        is_known = (
            self.budget.rules.has_async_scheduling or request.num_generated == request.num_emitted
        )
        is_loaded = request.loaded_ns <= self.budget.now_ns
        return not request.has_all_scheduled and is_known and is_loaded

    def schedule(self, request: SimRequest, num_tokens: int) -> None:
        """Add the next tokens of a running request, whose blocks are there.

        Of those proposed for a decoding one only the accepted stay in the cache. All are verified
        in one attention over its context, whose reads set the time.
        """
        num_kept, num_rows = num_tokens, 1
        if request.is_decoding:
            num_kept, num_rows = request.count_yield(num_tokens), num_tokens
            self.decodes.append(request.num_computed + num_tokens)
        else:
            self.prefills.append((request, num_tokens, request.num_computed))
        if request.scheduled_ns == NOT_REACHED:
            request.scheduled_ns = self.budget.now_ns
        self.num_tokens += num_tokens
        request.num_computed += num_kept
        self.kv.name_blocks(request)
        num_new = request.num_computed - request.num_tokens + 1
        if num_new > 0:
            request.num_generated += num_new
            request.num_draft = request.drafting.num_tokens if request.drafting else 0
            self.rows.append(request)
            self.yields.append(num_new)
            self.num_rows += num_rows

    def can_fit(self, found: Prefix, num_tokens: int, num_running: int) -> bool:
        """Whether there is room for a request of that many tokens, given what was found of it.

        The watermark stays free, unless nothing runs.
        """
        kv = self.kv
        num_spare = int(self.budget.rules.watermark_ratio * kv.num_blocks) if num_running else 0
        num_taken = kv.blocks_for(num_tokens) - len(found.blocks) + found.num_idle
        return num_taken <= kv.num_free - num_spare

    def admit(self, queues: "Queues", found: Prefix, num_held: int, num_new: int) -> None:
        """Let the first waiting request run: `num_new` tokens of it are in the batch.

        It gets what was found and blocks for `num_held` tokens in all, which are at least those of
        what was found and of its piece; `can_fit` said that they are there. What a tier keeps has
        to be loaded first: then it runs without being in the batch.
        """
        request = queues.waiting.popleft()
        now_ns = self.budget.now_ns
        if request.is_swapped and self.kv.store:
            request.is_swapped = False
            num_blocks = self.kv.blocks_for(request.num_computed)
            request.loaded_ns = self.kv.store.swap_in(num_blocks, now_ns)
        else:
            self.kv.take_prefix(request, found, now_ns)
        self.kv.allocate(request, num_held, now_ns)
        queues.running.append(request)
        if request.loaded_ns <= now_ns:
            self.schedule(request, num_new)

    def admit_first(self, queues: "Queues") -> bool:
        """Let the first waiting request run if there is room, or do nothing and return False.

        It holds blocks for its first piece, or for its whole answer where admission wants that.
        """
        request = queues.waiting[0]
        if not self.can_schedule(request):
            return False
        found = Prefix() if request.is_swapped else self.kv.find_prefix(request)
        num_there = found.num_blocks * self.kv.block_size
        if request.is_swapped:
            num_there = request.num_computed
        num_new = self.limit_piece(request.num_tokens - num_there)
        num_held = num_there + num_new
        admission = self.budget.rules.admission
        num_fit = num_held if admission == "chunk" else request.num_tokens
        if admission == "answer":
            num_fit = request.num_kv_tokens_max
        if not self.can_fit(found, num_fit, len(queues.running)):
            return False
        self.admit(queues, found, num_fit if admission == "answer" else num_held, num_new)
        return True

    def preempt(self, queues: "Queues", index: int, *, goes_last: bool = False) -> SimRequest:
        """Take the blocks of the running request at a place and let it wait, in front or last.

        It computes everything again, unless it can be swapped to the first tier. If its last token
        is in flight it does not wait any more.
        """
        request = queues.running.pop(index)
        store = self.kv.store
        if (
            self.budget.rules.preemption == "swap"
            and store
            and not request.has_all_scheduled
            and store.can_swap_out(self.kv.blocks_for(request.num_computed))
        ):
            store.swap_out(self.kv.blocks_for(request.num_computed), self.budget.now_ns)
            request.is_swapped = True
        else:
            request.num_computed = 0
        request.num_draft = 0
        self.kv.free(request)
        request.num_preemptions += 1
        request.loaded_ns = NOT_REACHED
        self.preempted.append(request)
        if not request.has_all_scheduled and goes_last:
            queues.waiting.append(request)
        elif not request.has_all_scheduled:
            queues.waiting.appendleft(request)
        return request


class Queues(NamedTuple):
    """Requests that run, in the order of admission, and those that wait."""

    running: list[SimRequest]
    waiting: deque[SimRequest]


class Scheduler(Protocol):
    """The rules by which an engine chooses its batches; every engine has one of its own."""

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work; requests move between `running` and `waiting`."""


# `SCHEDULER` of a plug-in.
SchedulerFactory: TypeAlias = Callable[[EngineProfile], Scheduler]
