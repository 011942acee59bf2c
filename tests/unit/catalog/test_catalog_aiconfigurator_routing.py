"""The load of the rank that a MoE measurement timed."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from foretoken.catalog.importers.aiconfigurator.moe_table import LocalLoad, Routing, local_load


def _balanced_by_hand(routing: Routing) -> LocalLoad:
    """Deal every token out one by one, as the collector does."""
    stride = math.ceil(routing.num_experts / routing.top_k)
    counts: Counter[int] = Counter()
    for token, choice in itertools.product(range(routing.num_tokens), range(routing.top_k)):
        start = token if routing.num_tokens >= stride else token * stride / routing.num_tokens
        counts[int((start + choice * stride) % routing.num_experts)] += 1
    local = [counts[expert] for expert in range(routing.num_experts // routing.num_ranks)]
    return LocalLoad(sum(local), sum(count > 0 for count in local))


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 31, 64, 1000])
@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 16), (2, 8), (6, 64), (8, 256)])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_balanced_tokens_are_counted_as_they_are_dealt(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int
) -> None:
    routing = Routing(num_tokens, top_k, num_experts, num_ranks, "balanced")
    assert _balanced_by_hand(routing) == local_load(routing)


@pytest.mark.parametrize("distribution", ["balanced", "uniform", "power_law_1.01", "power_law_1.2"])
@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 16), (2, 8), (8, 256)])
@pytest.mark.parametrize("num_tokens", [1, 8, 4096])
def test_a_single_rank_computes_every_pair(
    distribution: str, top_k: int, num_experts: int, num_tokens: int
) -> None:
    load = local_load(Routing(num_tokens, top_k, num_experts, 1, distribution))
    assert num_tokens * top_k == load.num_pairs
    assert 1 <= load.num_active <= min(num_experts, load.num_pairs)


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
@pytest.mark.parametrize("num_tokens", [1, 16, 512, 8192])
def test_the_rank_of_a_power_law_is_the_fullest(num_ranks: int, num_tokens: int) -> None:
    """It has at least its even share, at most a pair for each token and expert."""
    load = local_load(Routing(num_tokens, 8, 256, num_ranks, "power_law_1.2"))
    assert load.num_pairs >= num_tokens * 8 // num_ranks
    assert load.num_pairs <= min(num_tokens * 8, num_tokens * 256 // num_ranks)
    assert 1 <= load.num_active <= min(256 // num_ranks, load.num_pairs)


def test_the_power_law_is_the_collectors() -> None:
    """Its algorithm, a token at a time with other random numbers, gives the same in the mean."""
    rng = np.random.default_rng(1)
    drawn = [_power_law_by_hand(rng, 64, 8, 128, 8, 1.2) for _ in range(200)]
    pairs, active = np.mean(drawn, axis=0)
    load = local_load(Routing(64, 8, 128, 8, "power_law_1.2"))
    assert pytest.approx(pairs, rel=0.05) == load.num_pairs
    assert pytest.approx(active, abs=1) == load.num_active


def _power_law_by_hand(
    rng: np.random.Generator,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    alpha: float,
) -> tuple[int, int]:
    low, high = 1.0 ** (1 - alpha), (0.8 * num_tokens) ** (1 - alpha)
    shares = ((high - low) * rng.random(num_experts) + low) ** (1 / (1 - alpha))
    counts = np.rint(shares / shares.sum() * num_tokens * top_k).astype(int)
    counts = np.minimum(counts, num_tokens).reshape(num_ranks, -1)
    missing = num_tokens * top_k - int(counts.sum())
    step = 1 if missing > 0 else -1
    for turn in range(abs(missing)):
        rank = counts[turn % num_ranks]
        rank[rank.argmin() if step > 0 else rank.argmax()] += step
    fullest = counts[counts.sum(axis=1).argmax()]
    return int(fullest.sum()), int((fullest > 0).sum())


@pytest.mark.parametrize(
    "routing",
    [
        Routing(1, 9, 8, 1, "balanced"),
        Routing(1, 0, 8, 1, "balanced"),
        Routing(1, 2, 8, 3, "balanced"),
        Routing(0, 2, 8, 1, "balanced"),
        Routing(1, 2, 1 << 40, 1, "balanced"),
    ],
)
def test_an_impossible_load_says_why(routing: Routing) -> None:
    assert str(routing.num_experts) in routing.fault
