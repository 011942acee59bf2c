"""One request on its way through an engine."""

from foretoken.simulator.serving.record import NOT_REACHED
from foretoken.simulator.serving.speculation import Drafting


class SimRequest:
    """State of a request; times in ns, -1 where not yet reached.

    `num_computed` tokens are in the KV cache or in a step that puts them there, `num_generated`
    output tokens are scheduled, and the user has seen `num_emitted`. `blocks` are those it holds,
    of which the first `num_named` can be found by content; `name` is that of the last of them.
    It may not run before `loaded_ns`. `token_runs` are output tokens that left at evenly spaced
    steps: [first step, stride, count], or with stride 0 together. Where tokens are proposed as
    `drafting` says, its next step verifies `num_draft` of them.
    """

    __slots__ = (
        "blocks",
        "drafting",
        "engine",
        "finished_ns",
        "first_token_ns",
        "index",
        "is_swapped",
        "loaded_ns",
        "name",
        "num_cached",
        "num_computed",
        "num_decode_tokens",
        "num_draft",
        "num_emitted",
        "num_generated",
        "num_loaded",
        "num_named",
        "num_preemptions",
        "num_prefill_tokens",
        "outcome",
        "priority",
        "queued_ns",
        "scheduled_ns",
        "token_runs",
    )

    def __init__(
        self,
        index: int,
        num_prefill_tokens: int,
        num_decode_tokens: int,
        priority: int = 0,
        drafting: Drafting | None = None,
    ) -> None:
        self.index = index
        self.drafting = drafting
        self.priority = priority
        self.num_prefill_tokens = num_prefill_tokens
        self.num_decode_tokens = num_decode_tokens
        self.num_preemptions = self.num_cached = self.num_loaded = 0
        self.blocks: list[int] = []
        self.begin(NOT_REACHED)

    def begin(self, engine: int) -> None:
        """Begin anew on an engine, without a block; what is counted goes on."""
        self.engine = engine
        self.num_computed = self.num_generated = self.num_emitted = self.num_draft = 0
        self.blocks = []
        self.num_named = 0
        self.name = 0
        self.is_swapped = False
        self.queued_ns = self.scheduled_ns = NOT_REACHED
        self.first_token_ns = self.finished_ns = self.loaded_ns = NOT_REACHED
        self.outcome = 0
        self.token_runs: list[list[int]] = []

    def land(self) -> None:
        """Go on with a prompt that was computed elsewhere, whose first token has left."""
        self.num_computed = self.num_prefill_tokens
        self.num_generated = self.num_emitted = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prefill_tokens + self.num_generated

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one; 1 while it decodes."""
        return self.num_tokens - self.num_computed

    @property
    def num_kv_tokens_max(self) -> int:
        """Tokens it has room for in the KV cache at most: the last one is not computed."""
        num_kept = self.num_prefill_tokens + self.num_decode_tokens - 1
        if self.drafting is None or self.num_decode_tokens == 1:
            return num_kept
        return num_kept + self.drafting.num_tokens + self.drafting.num_lookahead_tokens

    @property
    def num_kv_tokens_next(self) -> int:
        """Tokens it needs room for to decode: the next one, what was proposed, and what will be."""
        num_ahead = self.drafting.num_lookahead_tokens if self.drafting else 0
        return self.num_computed + 1 + self.num_draft + num_ahead

    @property
    def num_blocks(self) -> int:
        """KV blocks it holds."""
        return len(self.blocks)

    @property
    def is_decoding(self) -> bool:
        """Whether its next piece is one token after others that are there."""
        return self.num_uncomputed == 1 and self.num_computed > 0

    @property
    def has_all_scheduled(self) -> bool:
        """Whether its last output token is scheduled."""
        return self.num_generated >= self.num_decode_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its last output token has left."""
        return self.num_emitted >= self.num_decode_tokens

    def count_yield(self, num_tokens: int) -> int:
        """Return how many of the tokens that a decoding step computes are of the answer."""
        if self.drafting is None:
            return num_tokens
        return min(self.drafting.yields[self.num_generated], num_tokens)

    def emit_tokens(self, step: int, now_ns: int, most_stride: int, count: int = 1) -> None:
        """Note that output tokens left at the end of a step.

        One alone joins a run of tokens that leave up to `most_stride` steps apart.
        """
        if self.num_emitted == 0:
            self.first_token_ns = now_ns
        self.num_emitted += count
        if count > 1:
            self.token_runs.append([step, 0, count])
            return
        if self.token_runs:
            run = self.token_runs[-1]
            first_step, stride, length = run
            if length == 1 and step - first_step <= most_stride:
                run[1] = stride = step - first_step
            if step == first_step + stride * length:
                run[2] += 1
                return
        self.token_runs.append([step, 1, 1])
