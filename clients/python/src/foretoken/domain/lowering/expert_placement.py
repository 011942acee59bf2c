"""Which rank holds which expert: in order, or as a load balancer places them.

A balancer (EPLB) holds redundant copies of the experts with most tokens, and gives every rank as
many experts, one after the other to the rank with the least tokens so far. It knows the load of the
last steps; here it knows the load itself, and what moving experts takes is left out: engines do it
every few thousand steps.
Source: deepseek-ai/EPLB, `eplb.py` (`replicate_experts`, `balanced_packing`); vLLM,
`distributed/eplb/policy/default.py`; SGLang, `srt/eplb/eplb_algorithms/deepseek.py`.
"""

import heapq
from collections.abc import Sequence


def place_in_order(loads: Sequence[float], num_ranks: int) -> list[list[float]]:
    """Return the loads of each rank's experts where ranks hold neighbours."""
    width = len(loads) // num_ranks
    return [list(loads[start : start + width]) for start in range(0, len(loads), width)]


def place_balanced(loads: Sequence[float], num_ranks: int, num_redundant: int) -> list[list[float]]:
    """Return the loads of each rank's experts, `num_redundant` copies among them.

    `num_ranks` divides experts and copies. Copies of an expert have equal parts of its load.
    """
    by_load = sorted(_copies(loads, num_redundant), reverse=True)
    width = len(by_load) // num_ranks
    ranks: list[list[float]] = [[] for _ in range(num_ranks)]
    open_ranks = [(0.0, rank) for rank in range(num_ranks)]
    for load in by_load:
        total, rank = heapq.heappop(open_ranks)
        ranks[rank].append(load)
        if len(ranks[rank]) < width:
            heapq.heappush(open_ranks, (total + load, rank))
    return ranks


def _copies(loads: Sequence[float], num_redundant: int) -> list[float]:
    """Return the load of every copy; each more is of the expert whose copies have most."""
    queue = [(-load, expert, 1) for expert, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(num_redundant):
        _, expert, count = queue[0]
        heapq.heapreplace(queue, (-loads[expert] / (count + 1), expert, count + 1))
    return [loads[expert] / count for _, expert, count in queue for _ in range(count)]
