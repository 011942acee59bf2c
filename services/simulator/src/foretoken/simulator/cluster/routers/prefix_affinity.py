"""Send a request to the engine that has most likely its prompt's beginning in the prefix cache.

The router remembers the prompts it sent where; it does not see what an engine has evicted since.
Source: SGLang's router (sgl-router, policy `cache_aware`) and its defaults: a cache threshold of
0.3, and no affinity while the busiest engine has 64 requests and 1.5 times more than the idlest. A
prompt that matches too little goes to the engine with the fewest requests, not to that with the
smallest record. Its record of 2^26 characters is 2^24 tokens here, four characters to a token.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, least_outstanding
from foretoken.simulator.serving.policy_options import PolicyOptions

_MATCH_RATIO = 0.3
_BALANCE_REQUESTS = 64.0
_BALANCE_RATIO = 1.5
_MAX_TOKENS = 2.0**24


class PrefixAffinityRouter:
    """Keeps, for every engine, the beginnings of the prompts it was sent.

    Options: `match_ratio` (part of a prompt that must match, more than that), `balance_requests`
    and `balance_ratio` (out of balance above both), `max_indexed_tokens` of an engine's record.
    """

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        names = ("match_ratio", "balance_requests", "balance_ratio", "max_indexed_tokens")
        read = PolicyOptions("routing", options, names)
        self._match_ratio = read.number("match_ratio", _MATCH_RATIO, high=1.0)
        self._balance_requests = read.number("balance_requests", _BALANCE_REQUESTS)
        self._balance_ratio = read.number("balance_ratio", _BALANCE_RATIO, low=1.0)
        self._max_tokens = read.positive("max_indexed_tokens", _MAX_TOKENS)
        # The least recently sent first; what an entry continues is always more recent than it, so
        # that a record holds prompts from their beginning.
        self._records: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return the engine of the longest match, the less loaded of several; else the least."""
        prefixes = _chain(request.blocks.tolist())
        # Loads are looked up once: that may take as long as all the rest.
        seen = {engine: loads[engine] for engine in engines}
        candidates = engines
        if prefixes and self._is_balanced(seen.values()):
            matches = {engine: _match(self._records[engine], prefixes) for engine in engines}
            longest = max(matches.values())
            if longest * request.block_tokens > self._match_ratio * request.num_prefill_tokens:
                candidates = [engine for engine in engines if matches[engine] == longest]
        chosen = least_outstanding(candidates, seen)
        self._remember(chosen, prefixes, request.block_tokens)
        return chosen

    def _is_balanced(self, loads: Iterable[EngineLoad]) -> bool:
        counts = [load.num_outstanding for load in loads]
        most, least = max(counts), min(counts)
        return most - least <= self._balance_requests or most <= self._balance_ratio * least

    def _remember(self, engine: int, prefixes: Sequence[int], block_tokens: int) -> None:
        record = self._records[engine]
        for prefix in reversed(prefixes):
            record[prefix] = None
            record.move_to_end(prefix)
        while len(record) * block_tokens > self._max_tokens:
            record.popitem(last=False)


def _chain(blocks: Iterable[int]) -> list[int]:
    """Return a name of every block together with all before it."""
    prefixes, before = [], 0
    for block in blocks:
        # Of numbers alone: the same in every process.
        before = hash((before, block))
        prefixes.append(before)
    return prefixes


def _match(record: OrderedDict[int, None], prefixes: Sequence[int]) -> int:
    """Return how many blocks from the first on are in a record."""
    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high + 1) // 2
        if prefixes[middle - 1] in record:
            low = middle
        else:
            high = middle - 1
    return low


ROUTER = PrefixAffinityRouter
