"""The best cut, by dynamic programming over stages and where they end.

The longest stage of the best cut of the first `j` nodes to `s` stages is the least, over where its
last stage begins, of that stage and the best cut of the nodes before to one stage less. Only stages
are looked at that are no longer than a cut that is known, so that a row of them is short. A second
pass looks for the least total among the cuts that are as good.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from foretoken.simulator.grid import Floats
from foretoken.simulator.search.placement.chain import Chain, Cut, PartitionMethod
from foretoken.simulator.search.placement.partition.min_max import cut_min_max

_ROUNDING = 1 + 1e-9


def cut_optimally(chain: Chain) -> Cut:
    """Return a cut whose longest stage no other cut that fits is below.

    Of those as good it has the least total: that is how long a pipeline takes to fill and to empty.
    """
    tables = _Tables(chain, cut_min_max(chain).longest)
    longest = _extend_all(chain, tables.extend_longest)[-1][-1]
    if not np.isfinite(longest):
        return Cut()
    tables = _Tables(chain, float(longest))
    best = _extend_all(chain, tables.extend_total)
    ends = [chain.num_nodes]
    for stage in range(chain.num_stages - 1, 0, -1):
        ends.insert(0, tables.find_start(best[stage], stage, ends[0]))
    return Cut.at(ends, chain, is_optimal=True)


def _extend_all(chain: Chain, extend: Callable[[Floats, int], Floats]) -> list[Floats]:
    """Return the best of the first nodes, by how many they are, for every number of stages."""
    best = [np.concatenate([[0.0], np.full(chain.num_nodes, np.inf)])]
    for stage in range(chain.num_stages):
        best.append(extend(best[stage], stage))
    return best


class _Tables:
    """What stages cost by where they end and how many nodes they have: (nodes, widths).

    The widest stage comes first, so that a row lies over the best cuts before it in their order. No
    stage is longer than `longest`.
    """

    def __init__(self, chain: Chain, longest: float) -> None:
        self._chain = chain
        self._limit = longest
        self._costs: dict[int, Floats] = {}

    def extend_longest(self, before: Floats, stage: int) -> Floats:
        """Return the least longest stage by where this one ends, from those of one stage less."""
        costs = self._of_stage(stage)
        longest = np.maximum(_windows(before, costs.shape[1]), costs)
        return np.concatenate([[np.inf], longest.min(axis=1)])

    def extend_total(self, before: Floats, stage: int) -> Floats:
        """Return the least total by where this stage ends, from those of one stage less."""
        costs = self._of_stage(stage)
        totals = _windows(before, costs.shape[1]) + costs
        return np.concatenate([[np.inf], totals.min(axis=1)])

    def find_start(self, before: Floats, stage: int, end: int) -> int:
        """Return where the stage begins that ends before a node and has the least total."""
        costs = self._of_stage(stage)[end - 1]
        starts = np.arange(end - len(costs), end)
        known = np.where(starts >= 0, before[np.maximum(starts, 0)], np.inf)
        return int(starts[np.argmin(known + costs)])

    def _of_stage(self, stage: int) -> Floats:
        """Return the costs of a stage, what it sends and what has no room included."""
        chain = self._chain
        costs = self._of_kind(chain.kinds[stage])
        is_changed = False
        if chain.has_transfers and stage + 1 < chain.num_stages:
            sent = np.concatenate([chain.transfers[:, stage], [0.0]])
            costs, is_changed = costs + sent[:, None], True
        if chain.has_memory:
            needed = _spans(chain.byte_sums[stage], costs.shape[1])
            costs = costs if is_changed else costs.copy()
            costs[needed > chain.room_bytes[stage]] = np.inf
        if is_changed:
            costs[costs > self._limit] = np.inf
        return costs

    def _of_kind(self, kind: int) -> Floats:
        if kind not in self._costs:
            sums = self._chain.cost_sums[kind]
            costs = _spans(sums, _widest(sums, self._limit * _ROUNDING))
            costs[costs > self._limit] = np.inf
            self._costs[kind] = costs
        return self._costs[kind]


def _windows(before: Floats, width: int) -> Floats:
    """Return the best of one stage less by where this one ends and how many nodes it has."""
    starts = np.concatenate([np.full(width, np.inf), before[:-1]])
    return starts[_places(len(before) - 1, width)]


def _widest(sums: Floats, limit: float) -> int:
    """Return the most nodes that a stage no longer than `limit` has."""
    most = len(sums) - 1
    if not np.isfinite(limit):
        return most
    ends: NDArray[np.intp] = np.searchsorted(sums, sums + limit, side="right") - 1
    return int(min(most, max(1, int((ends - np.arange(len(sums))).max()) + 1)))


def _spans(sums: Floats, width: int) -> Floats:
    """Return the sums over up to `width` nodes before each end, the most nodes first."""
    padded = np.concatenate([np.full(width, -np.inf), sums[:-1]])
    found: Floats = sums[1:, None] - padded[_places(len(sums) - 1, width)]
    return found


@lru_cache(maxsize=256)
def _places(num_nodes: int, width: int) -> NDArray[np.intp]:
    """Return where the windows of so many nodes before each lie: (nodes, widths)."""
    return np.arange(1, num_nodes + 1)[:, None] + np.arange(width)


METHOD = PartitionMethod(name="dynamic", cut=cut_optimally)
