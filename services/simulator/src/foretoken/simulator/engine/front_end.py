"""The server in front of engines: it tokenizes prompts and hands requests to executors.

Each does so with one request after the other, in the order in which they come; both do it at once.
"""

from typing import Protocol

import numpy as np

from foretoken.domain.units import NS_PER_MS, NS_PER_US


class FrontEndRules(Protocol):
    """What a front end takes: an `EngineProfile`, or the state of a simulation."""

    @property
    def frontend_ms(self) -> float:
        """What a request takes that keeps none of the others waiting."""

    @property
    def frontend_us_per_token(self) -> float:
        """What the tokenizer takes for a token of a prompt."""

    @property
    def executor_us_per_token(self) -> float:
        """What it takes to hand a token of a prompt to the executor."""


def pass_front_end(
    rules: FrontEndRules, num_tokens: int, now_ns: int, free_ns: tuple[int, int]
) -> tuple[int, int, int]:
    """Return when a prompt is tokenized, handed over, and where the engine finds it.

    `free_ns` are when the tokenizer, and what hands over, have done what came before.
    """
    tokenizer_us = rules.frontend_us_per_token * num_tokens
    executor_us = rules.executor_us_per_token * num_tokens
    tokenized_ns = max(now_ns, free_ns[0]) + int(np.rint(tokenizer_us * NS_PER_US))
    sent_ns = max(tokenized_ns, free_ns[1]) + int(np.rint(executor_us * NS_PER_US))
    there_ns = sent_ns + int(np.rint(rules.frontend_ms * NS_PER_MS))
    return tokenized_ns, sent_ns, there_ns
