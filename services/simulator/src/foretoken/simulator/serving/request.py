"""One request on its way through a replica."""


class SimRequest:
    """State of a request; times in ns, -1 where not yet reached.

    `num_computed` tokens are in the KV cache, `num_generated` the user has seen, `num_uncomputed`
    are to compute before the next one: 1 while it decodes. `token_runs` are (first step, count):
    output tokens that left at the ends of consecutive steps of the replica.
    """

    __slots__ = (
        "arrival_ns",
        "index",
        "num_blocks",
        "num_computed",
        "num_decode_tokens",
        "num_generated",
        "num_preemptions",
        "num_prefill_tokens",
        "num_slots",
        "num_uncomputed",
        "order",
        "replica",
        "scheduled_ns",
        "token_runs",
    )

    def __init__(
        self, index: int, arrival_ns: int, num_prefill_tokens: int, num_decode_tokens: int
    ) -> None:
        self.index = index
        self.arrival_ns = arrival_ns
        self.num_prefill_tokens = num_prefill_tokens
        self.num_decode_tokens = num_decode_tokens
        self.num_computed = 0
        self.num_uncomputed = num_prefill_tokens
        self.num_generated = 0
        self.num_blocks = 0
        self.num_slots = 0  # tokens its KV blocks can hold
        self.num_preemptions = 0
        self.replica = -1
        self.order = 0  # place in the order of admission to the replica
        self.scheduled_ns = -1
        self.token_runs: list[list[int]] = []

    @property
    def is_finished(self) -> bool:
        """Whether all its output tokens have left."""
        return self.num_generated >= self.num_decode_tokens

    @property
    def num_kv_tokens_max(self) -> int:
        """KV slots it needs in the end; the last output token is never written."""
        return self.num_prefill_tokens + self.num_decode_tokens - 1

    def compute(self, num_tokens: int, step: int) -> None:
        """Note that a step computed so many tokens; with the last of them an output token left."""
        self.num_computed += num_tokens
        self.num_uncomputed -= num_tokens
        if self.num_uncomputed == 0:
            self.num_uncomputed = 1
            self.emit_tokens(step, 1)

    def restart(self) -> None:
        """Forget what was computed; the user keeps the tokens seen."""
        self.num_computed = 0
        self.num_uncomputed = self.num_prefill_tokens + self.num_generated
        self.num_preemptions += 1

    def emit_tokens(self, first_step: int, count: int) -> None:
        """Note that a token left at the end of each of `count` steps from `first_step` on."""
        self.num_generated += count
        runs = self.token_runs
        if runs and runs[-1][0] + runs[-1][1] == first_step:
            runs[-1][1] += count
        else:
            runs.append([first_step, count])
