"""Experts that tokens draw by their popularity, as routers of trained models do.

A batch of few tokens hits fewer experts than if each were as likely: of gpt-oss-120b's 128 experts
256 tokens hit 105 (median of 108 layers, 77 to 116), and the most popular one gets 84.5 of them.
Popularities of which the logarithm is normal with a deviation of 1.35 give 109 and 88, those of 1.4
107 and 95, of 1.2 113 and 79.
Source: ai-dynamo/aisimulate pull request 264, `gym-tpot-serving-20260917.md`.

Where all are as likely some rank still gets more tokens than others, of few tokens most: of four
tokens to 8 of 256 experts on eight ranks it is 7 in place of 4, of 64 it is 76 in place of 64.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist, fmean

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.stack import stack_of
from foretoken.domain.units import Quantity

_LOGNORMAL = re.compile(r"lognormal_(\d+(?:\.\d+)?)")
# Spreads that were counted, by the experts of the model: its features, experts, experts of a token.
_COUNTED = {(2880, 128, 4): "lognormal_1.35"}
# Layers drawn for one expectation, of as many experts as a model has.
_NUM_LAYERS = 16
_SEED = 0
_NUM_BISECTIONS = 60


def routing_deviation(name: str) -> float | None:
    """Return how much the logarithms of experts' popularities deviate, None by another name."""
    match = _LOGNORMAL.fullmatch(name)
    return float(match[1]) if match else None


def counted_routing(model: ModelArchitecture) -> str:
    """Return how a model spreads tokens over its experts where that was counted, else uniformly."""
    for part, _ in stack_of(model).parts:
        if part.kind == "experts":
            shape = (model.hidden, part["num_experts"], part["top_k"])
            return _COUNTED.get(shape, "uniform")
    return "uniform"


@lru_cache(maxsize=64)
def draw_chances(deviation: float, top_k: int, num_experts: int) -> tuple[tuple[float, ...], ...]:
    """Return for each of some layers with what chance a token goes to each expert.

    A token draws until it has `top_k` different ones; the chance of an expert of popularity p is
    1 - exp(-tp), with the t that makes them `top_k` together.
    Source: B. Rosén, Asymptotic theory for order sampling, 1997.
    """
    source = random.Random(_SEED)  # noqa: S311 - a fixed sample, not a secret
    normal = NormalDist()
    layers = []
    for _ in range(_NUM_LAYERS):
        # One of each quantile, so that few layers do.
        quantiles = [normal.inv_cdf((i + 0.5) / num_experts) for i in range(num_experts)]
        source.shuffle(quantiles)
        layers.append(_chances([math.exp(deviation * value) for value in quantiles], top_k))
    return tuple(layers)


def _chances(popularities: Sequence[float], top_k: int) -> tuple[float, ...]:
    if top_k >= len(popularities):
        return (1.0,) * len(popularities)
    low, high = 0.0, 1.0
    while sum(1 - math.exp(-high * p) for p in popularities) < top_k:
        high *= 2
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        if sum(1 - math.exp(-middle * p) for p in popularities) < top_k:
            low = middle
        else:
            high = middle
    return tuple(1 - math.exp(-high * p) for p in popularities)


@dataclass(frozen=True, slots=True)
class RankChances:
    """What of the ranks' loads does not depend on how many tokens there are.

    `means` are the pairs of one token on each rank. Of the fullest rank `variance` is of these
    pairs, and `misses` with what chance a token goes past each of its experts.
    """

    means: tuple[float, ...]
    fullest: int
    variance: float
    misses: tuple[float, ...]

    @classmethod
    def of(cls, ranks: Sequence[Sequence[float]]) -> "RankChances":
        """Return it from the chances of each rank's experts."""
        means = tuple(sum(chances) for chances in ranks)
        fullest = max(range(len(ranks)), key=means.__getitem__)
        chances = ranks[fullest]
        return cls(
            means=means,
            fullest=fullest,
            variance=sum(chance * (1 - chance) for chance in chances),
            misses=tuple(1 - min(chance, 1 - 1e-12) for chance in chances),
        )


def busiest_load(ranks: RankChances, num_tokens: int) -> tuple[float, float]:
    """Return the expected pairs and active experts of the rank with most pairs.

    What a rank gets varies from step to step: of many that vary alike the largest is as far out as
    the quantile of one in so many.
    Source: G. Blom, Statistical estimates and transformed beta-variables, 1958.
    """
    num_ranks = len(ranks.means)
    mean = num_tokens * ranks.means[ranks.fullest]
    variance = num_tokens * ranks.variance
    excess = _excess(num_ranks) * math.sqrt(variance) if num_ranks > 1 else 0.0
    # Ranks that are behind on average seldom come first.
    pairs = max(mean, fmean(num_tokens * each for each in ranks.means) + excess)
    tokens = num_tokens * (pairs / mean if mean else 1.0)
    return pairs, sum(1 - miss**tokens for miss in ranks.misses)


def uniform_imbalance(
    num_tokens: Quantity, top_k: int, num_experts: int, num_ranks: int
) -> Quantity:
    """Return what the rank with most pairs is expected to have over the mean.

    Each token draws `top_k` different experts, all as likely: what a rank gets of one is
    hypergeometric. The largest of many is taken as above.
    """
    share = 1 / num_ranks
    missed = (num_experts - top_k) / max(num_experts - 1, 1)
    variance = top_k * share * (1 - share) * missed
    return 1 + _excess(num_ranks) * (variance / num_tokens) ** 0.5 / (top_k * share)


@cache
def _excess(num_ranks: int) -> float:
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
