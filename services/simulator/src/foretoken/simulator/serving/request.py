"""One request on its way through an engine."""

from foretoken.simulator.serving.record import NOT_REACHED


class SimRequest:
    """State of a request; times in ns, -1 where not yet reached.

    `num_computed` tokens are in the KV cache or in a step that puts them there, `num_generated`
    output tokens are scheduled, and the user has seen `num_emitted`. `blocks` are those it holds,
    of which the first `num_named` can be found by content; `name` is that of the last of them.
    It may not run before `loaded_ns`. `token_runs` are output tokens that left at evenly spaced
    steps: [first step, stride, count].
    """

    __slots__ = (
        "arrival_ns",
        "blocks",
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
        "num_emitted",
        "num_generated",
        "num_loaded",
        "num_named",
        "num_preemptions",
        "num_prefill_tokens",
        "outcome",
        "queued_ns",
        "ready_ns",
        "scheduled_ns",
        "token_runs",
    )

    def __init__(self, index: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.index = index
        self.num_prefill_tokens = num_prefill_tokens
        self.num_decode_tokens = num_decode_tokens
        self.num_computed = self.num_generated = self.num_emitted = 0
        self.num_preemptions = self.num_cached = self.num_loaded = 0
        self.blocks: list[int] = []
        self.num_named = 0
        self.name = 0
        self.is_swapped = False
        self.arrival_ns = self.ready_ns = self.queued_ns = self.scheduled_ns = NOT_REACHED
        self.first_token_ns = self.finished_ns = self.loaded_ns = NOT_REACHED
        self.engine = NOT_REACHED
        self.outcome = 0
        self.token_runs: list[list[int]] = []

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
        """Tokens it keeps in the KV cache at most: the last one is not computed."""
        return self.num_prefill_tokens + self.num_decode_tokens - 1

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

    def emit_token(self, step: int, now_ns: int, most_stride: int) -> None:
        """Note that an output token left at the end of a step.

        It joins a run of tokens that leave up to `most_stride` steps apart.
        """
        if self.num_emitted == 0:
            self.first_token_ns = now_ns
        self.num_emitted += 1
        if self.token_runs:
            run = self.token_runs[-1]
            first_step, stride, count = run
            if count == 1 and step - first_step <= most_stride:
                run[1] = stride = step - first_step
            if step == first_step + stride * count:
                run[2] += 1
                return
        self.token_runs.append([step, 1, 1])
