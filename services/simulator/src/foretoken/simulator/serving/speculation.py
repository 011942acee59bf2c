"""Speculative decoding: what a verification yields, and what it takes of an engine's steps.

A step verifies the tokens that a draft proposed for a sequence, all at once, and the draft proposes
the next ones at the end of the step. Sources: Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding" (the acceptance model); vLLM 0.20, v1/core/sched/scheduler.py (slots),
v1/spec_decode/eagle.py (passes of the draft).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.requests.cluster import SpeculativeSpec
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.serving.record import Ints, StepRecord
from foretoken.simulator.workload.rng import named_stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """How an engine speculates: tokens are proposed for a sequence in every step.

    Each is accepted with its own of `acceptance_ratios` where all before it were.

    The drafts need KV slots for `num_lookahead_tokens` beyond those that are verified. `draft` are
    the times of a pass of the draft (None: proposals take no time). What is accepted comes from the
    `seed`.
    """

    acceptance_ratios: tuple[float, ...]
    num_lookahead_tokens: int = 0
    draft: CostTables | None = None
    seed: int = 0

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed for a sequence in every step."""
        return len(self.acceptance_ratios)


def speculation_of(spec: SpeculativeSpec | None, seed: int) -> Speculation | None:
    """Return how an engine speculates; the times of its draft are not known yet."""
    if spec is None:
        return None
    # Proposals from the text write nothing into the cache.
    num_ahead = 0 if spec.method == "ngram" else spec.num_draft_tokens
    return Speculation(
        acceptance_ratios=spec.conditional_ratios,
        num_lookahead_tokens=num_ahead,
        seed=seed,
    )


def draw_yields(num_decode_tokens: Ints, speculation: Speculation) -> NDArray[np.int64]:
    """Return what a verification yields that begins at each token of each answer, in one row.

    Whether the draft would guess a token is a property of the text: drawn once per token, so that
    it does not depend on batches, and more drafts or a higher ratio never yield less. It ends with
    the answer.
    """
    ends = np.cumsum(num_decode_tokens, dtype=np.int64)
    num_places = int(ends[-1]) if len(ends) else 0
    places = np.arange(num_places)
    chance = named_stream(speculation.seed, "speculation").random(num_places)
    num_accepted, is_accepted = np.zeros_like(places), np.ones(num_places, dtype=np.bool_)
    for ahead, ratio in enumerate(speculation.acceptance_ratios):
        last = max(num_places - ahead, 0)
        is_accepted[:last] &= chance[ahead:] < ratio
        is_accepted[last:] = False
        num_accepted += is_accepted
    num_left = np.repeat(ends, num_decode_tokens) - places
    return np.asarray(np.minimum(num_accepted + 1, num_left), dtype=np.int64)


def draft_steps(steps: StepRecord, num_draft_tokens: int) -> Iterator[StepRecord]:
    """Yield the passes of the draft in many steps, as the engine's `draft_us` times them in one."""
    num_seqs = np.asarray(steps.num_decodes + steps.num_prefills)
    yield replace(steps, num_rows=num_seqs)
    prefill_kv = np.asarray(steps.prefill_context + steps.prefill_tokens)
    kv_tokens = np.array(steps.decode_kv_tokens, dtype=np.int64)
    np.add.at(kv_tokens, steps.prefill_step, prefill_kv)
    longest = np.array(steps.decode_kv_tokens_max, dtype=np.int64)
    np.maximum.at(longest, steps.prefill_step, prefill_kv)
    nothing = np.zeros(0, dtype=np.int64)
    for place in range(1, num_draft_tokens):
        yield replace(
            steps,
            num_tokens=num_seqs,
            num_group_tokens=steps.num_group_seqs,
            num_rows=num_seqs,
            num_decodes=num_seqs,
            num_prefills=np.zeros_like(num_seqs),
            decode_kv_tokens=kv_tokens + place * num_seqs,
            decode_kv_tokens_max=longest + place,
            prefill_step=nothing,
            prefill_request=nothing,
            prefill_tokens=nothing,
            prefill_context=nothing,
        )
