"""The requests of a simulation before it runs, as columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# In `follows`, `slo_class` and `prefix_stream`: there is none.
NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """One entry per request, in the order they may arrive; times in ns.

    `arrival_ns` is the earliest arrival, ascending. A request with `follows` (an earlier index)
    arrives `think_ns` after that one is complete, or at `arrival_ns` if that is later. With
    `concurrency` above 0 the loop is closed: that many requests without `follows` arrive at their
    `arrival_ns`, and each completed request lets the next such one arrive at that instant.

    Content, for prefix caching: the block of tokens from b x `block_size` on is named by the hash
    of the plan where `hashes[hash_offsets[r]:hash_offsets[r + 1]]`, one for `hash_block_tokens`
    tokens each, cover it; else by `prefix_stream` where it lies within the first `prefix_tokens`;
    else by `stream`. Blocks of equal name and place have equal content, prompt or answer; requests
    of a session share a stream. `slo_class` indexes the scenario's classes; of waiting requests the
    higher `priority` goes first where the scheduler knows priorities. `adapter` is the LoRA adapter
    each uses (None: none).
    """

    arrival_ns: Ints
    num_prefill_tokens: Ints
    num_decode_tokens: Ints
    follows: Ints
    think_ns: Ints
    slo_class: Ints
    priority: Ints
    stream: Ints
    prefix_stream: Ints
    prefix_tokens: Ints
    hash_offsets: Ints
    hashes: Ints
    hash_block_tokens: int = 0
    concurrency: int = 0
    adapter: Ints | None = None

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_ns)


def plan_requests(
    arrival_ns: Ints, num_prefill_tokens: Ints, num_decode_tokens: Ints, *, concurrency: int = 0
) -> RequestPlan:
    """Return requests that follow nothing, share nothing and have no class, by arrival."""
    order = np.argsort(arrival_ns, kind="stable")
    num_requests = len(order)
    none = np.full(num_requests, NONE, dtype=np.int64)
    zero = np.zeros(num_requests, dtype=np.int64)
    return RequestPlan(
        arrival_ns=np.asarray(arrival_ns, dtype=np.int64)[order],
        num_prefill_tokens=np.asarray(num_prefill_tokens, dtype=np.int64)[order],
        num_decode_tokens=np.asarray(num_decode_tokens, dtype=np.int64)[order],
        follows=none,
        think_ns=zero,
        slo_class=none,
        priority=zero,
        stream=np.arange(num_requests, dtype=np.int64),
        prefix_stream=none,
        prefix_tokens=zero,
        hash_offsets=np.zeros(num_requests + 1, dtype=np.int64),
        hashes=np.zeros(0, dtype=np.int64),
        concurrency=concurrency,
    )
