"""The tokens that experts take: what a router drops of those beyond an expert's capacity.

A rank that routes keeps for each expert no more of its tokens than the capacity factor times an
even share, rounded up. The others go past the layer's routed experts.
Source: Megatron-Core, `moe/moe_utils.py` (get_capacity, apply_router_token_dropping).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from foretoken.domain.units import Quantity

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCapacity:
    """What experts take of `num_tokens` that a rank routes to `top_k` of `num_experts` each.

    The capacity is `factor` times an even share.
    """

    factor: float
    num_tokens: Quantity
    top_k: int
    num_experts: int

    def keep(self, num_pairs: Quantity, num_shares: int) -> Quantity:
        """Return how many pairs of a token and an expert are kept of `num_pairs`.

        Each of `num_shares` experts of ranks that route is expected to have as many; how many it
        has varies from step to step.
        """
        if not hasattr(num_pairs, "tolist"):
            return self._keep_whole(num_pairs, self.num_tokens, num_shares)
        found = num_pairs * 0
        tokens = (found + self.num_tokens).reshape(-1).tolist()
        for place, pairs in enumerate(num_pairs.reshape(-1).tolist()):
            found.flat[place] = self._keep_whole(pairs, tokens[place], num_shares)
        return found

    def _keep_whole(self, num_pairs: float, num_tokens: float, num_shares: int) -> int:
        kept = self._keep(num_pairs / num_shares, num_tokens) * num_shares
        return max(1, round(kept))

    def _keep(self, mean: float, num_tokens: float) -> float:
        """Return the expectation of the smaller of the capacity and what an expert has."""
        most = math.ceil(num_tokens * self.top_k / self.num_experts * self.factor)
        # A token goes to an expert once or not at all.
        deviation = math.sqrt(max(0.0, mean * (1 - mean / num_tokens)))
        if deviation == 0:
            return min(mean, most)
        room = (most - mean) / deviation
        return mean - deviation * (_NORMAL.pdf(room) - room * (1 - _NORMAL.cdf(room)))
