"""Prompts whose content repeats where the workload's does, without a tokenizer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.simulator.workload.request_plan import NONE, RequestPlan

# Ordinary tokens of every vocabulary in use: the smallest (Llama 2's) has 32,000, and tokens with a
# meaning of their own come first or last.
_FIRST_TOKEN = 1_000
_NUM_TOKENS = 30_000
# English words that are one token with a space before them in byte-pair vocabularies; a server that
# counts differently says so, and its count is what is recorded.
_TEXT = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an"
    " they which one you were her all she there would their we him been has when who will more no"
    " if out so said what up its about into than them can only other new some could time these two"
    " may then do first any my now such like our over man me even most made after also did many"
)
_WORDS = tuple(_TEXT.split())
# What a name stands for, so that a hash and a stream of equal number differ.
_OF_HASH, _OF_PREFIX, _OF_STREAM = 1, 2, 3
_Unsigned = NDArray[np.uint64]


class PromptMaker:
    """Makes the prompts of a plan; equal parts of its content become equal tokens.

    Where a request continues another's session, the tokens in place of the answer before are made
    up too, as the server's own answers are not known beforehand.
    """

    def __init__(self, plan: RequestPlan, seed: int = 0) -> None:
        self._plan = plan
        self._seed = seed

    def make_token_ids(self, request: int) -> list[int]:
        """Return the prompt of a request as token ids."""
        mixed = self._mix(request) % np.uint64(_NUM_TOKENS)
        return [int(token) + _FIRST_TOKEN for token in mixed]

    def name_blocks(self, block_tokens: int) -> Sequence[tuple[int, ...]]:
        """Return names of the whole blocks of each prompt: small numbers, equal for equal tokens.

        None of any request where no two share content.
        """
        plan = self._plan
        shares = len(plan.hashes) or (plan.prefix_tokens > 0).any()
        if not shares and len(np.unique(plan.stream)) == plan.num_requests:
            return [()] * plan.num_requests
        numbers: dict[bytes, int] = {}
        named = []
        for request in range(plan.num_requests):
            mixed = self._mix(request)
            ends = range(block_tokens, len(mixed) + 1, block_tokens)
            blocks = (mixed[end - block_tokens : end].tobytes() for end in ends)
            named.append(tuple(numbers.setdefault(block, len(numbers)) for block in blocks))
        return named

    def make_words(self, request: int) -> str:
        """Return the prompt of a request as words, about one token each."""
        places = self._mix(request) % np.uint64(len(_WORDS))
        return " ".join(_WORDS[int(place)] for place in places)

    def make(self, request: int, *, as_token_ids: bool) -> Sequence[int] | str:
        """Return the prompt of a request."""
        return self.make_token_ids(request) if as_token_ids else self.make_words(request)

    def _mix(self, request: int) -> _Unsigned:
        """Return a pseudo-random number for each token, equal where names and places are."""
        plan = self._plan
        length = int(plan.num_prefill_tokens[request])
        place = np.arange(length, dtype=np.uint64)
        name = np.full(length, int(plan.stream[request]), dtype=np.uint64)
        kind = np.full(length, _OF_STREAM, dtype=np.uint64)
        prefix = int(plan.prefix_stream[request])
        if prefix != NONE:
            reach = min(int(plan.prefix_tokens[request]), length)
            name[:reach], kind[:reach] = prefix, _OF_PREFIX
        start, end = (int(plan.hash_offsets[request + index]) for index in (0, 1))
        if end > start:
            size = plan.hash_block_tokens
            named = np.repeat(plan.hashes[start:end].astype(np.uint64), size)[:length]
            name[: len(named)], kind[: len(named)] = named, _OF_HASH
        seed = np.uint64(self._seed % 2**64)
        return _scramble(place + _scramble(name + _scramble(kind + seed)))


def _scramble(values: _Unsigned) -> _Unsigned:
    """Return numbers that look random, the same for the same values.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix64).
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
