"""Search the length of the longest stage, and fill stages up to it one after the other.

Halving finds the least length that filling manages; then every length that is left below is tried.
Exact where all stages are alike. Where they differ, a stage that is filled may leave a node to the
next that is too large for it, so the cut may be longer than the best.
"""

from bisect import bisect_right
from math import inf, nextafter

import numpy as np

from foretoken.simulator.search.placement.chain import Chain, Cut, PartitionMethod

# Halvings that bring the bounds of doubles together, as far as they are worth it.
_MAX_HALVINGS = 60
_PRECISION = 1e-9


def cut_min_max(chain: Chain) -> Cut:
    """Return the shortest cut that filling stages in order finds."""
    filler = _Filler(chain)
    best = filler.fill(inf)
    if best is None:
        return Cut()
    low, high = 0.0, _longest(chain, best)
    for _ in range(_MAX_HALVINGS):
        if high - low <= _PRECISION * high:
            break
        middle = (low + high) / 2
        found = filler.fill(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(high, _longest(chain, found))
    while (found := filler.fill(nextafter(high, 0.0))) is not None:
        shorter = _longest(chain, found)
        if shorter >= high:
            break
        best, high = found, shorter
    return Cut.at(best, chain, is_optimal=chain.is_uniform)


def _longest(chain: Chain, ends: list[int]) -> float:
    return float(chain.stage_costs(np.asarray(ends)).max())


class _Filler:
    """Fills stages with as many nodes as a length allows: lists, for bisection of one number."""

    def __init__(self, chain: Chain) -> None:
        self._costs: list[list[float]] = chain.cost_sums.tolist()
        self._kinds = chain.kinds
        self._num_nodes = chain.num_nodes
        self._transfers: list[list[float]] = chain.transfers.T.tolist()
        self._bytes: list[list[float]] = chain.byte_sums.tolist() if chain.has_memory else []
        self._there: list[float] = chain.room_bytes.tolist()

    def fill(self, length: float) -> list[int] | None:
        """Return where stages end that are no longer; none where nodes are left or too large."""
        ends: list[int] = []
        start, last = 0, len(self._kinds) - 1
        for stage in range(last):
            most = self._reach(stage, start, length, self._num_nodes - (last - stage))
            if self._transfers:
                most = self._before_transfer(stage, start, most, length)
            if most <= start:
                return None
            ends.append(most)
            start = most
        end = self._reach(last, start, length, self._num_nodes)
        return [*ends, end] if end == self._num_nodes else None

    def _reach(self, stage: int, start: int, length: float, most: int) -> int:
        """Return where a stage ends that takes all it can from a node on."""
        sums = self._costs[self._kinds[stage]]
        end = bisect_right(sums, sums[start] + length, start, most + 1) - 1
        # The sum of the two may be rounded up, or down.
        while end > start and sums[end] - sums[start] > length:
            end -= 1
        while end < most and sums[end + 1] - sums[start] <= length:
            end += 1
        if self._bytes:
            sums = self._bytes[stage]
            end = min(
                end, bisect_right(sums, sums[start] + self._there[stage], start, most + 1) - 1
            )
        return end

    def _before_transfer(self, stage: int, start: int, end: int, length: float) -> int:
        """Return where it ends with what it sends."""
        sums, sent = self._costs[self._kinds[stage]], self._transfers[stage]
        while end > start and sums[end] - sums[start] + sent[end - 1] > length:
            end -= 1
        return end


METHOD = PartitionMethod(name="min_max", cut=cut_min_max)
