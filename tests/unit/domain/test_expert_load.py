"""Experts reached and the busiest rank's tokens, by routing."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.drawn_routing import counted_routing
from foretoken.domain.lowering.expert_layer import (
    ExpertRouting,
    count_places,
    expert_load,
    larger,
    rounded,
)
from foretoken.domain.lowering.expert_placement import place_balanced, place_in_order
from foretoken.domain.models.architecture import find_model


def test_few_tokens_reach_few_experts() -> None:
    one, eight = (ExpertRouting(top_k=top_k, num_experts=128) for top_k in (1, 8))
    assert [1, 8, 52, 128] == [
        expert_load(tokens, routing).num_active
        for tokens, routing in ((1, one), (1, eight), (8, eight), (999, eight))
    ]


def test_a_power_law_reaches_fewer_and_fills_one_rank_more() -> None:
    """64 tokens to 4 of 128 reach about 97 experts under a density of x^-1.01, 111 if balanced."""
    even = ExpertRouting(top_k=4, num_experts=128)
    skewed = ExpertRouting(top_k=4, num_experts=128, name="power_law_1.01")
    assert 111 == expert_load(64, even).num_active
    assert pytest.approx(97, abs=2) == expert_load(64, skewed).num_active
    ranks = ExpertRouting(top_k=4, num_experts=128, num_ranks=8, name="power_law_1.2")
    assert 1.3 * 64 * 4 / 8 < expert_load(64, ranks).num_pairs <= 64 * 4


def test_drawn_experts_are_as_many_as_were_counted() -> None:
    """Of gpt-oss-120b's experts 256 tokens hit 105, as published (median of 108 layers)."""
    routing = ExpertRouting(top_k=4, num_experts=128, name="lognormal_1.35")
    assert pytest.approx(105, rel=0.03) == expert_load(256, routing).num_active


def test_spreads_that_were_counted_go_by_the_experts_shape() -> None:
    model = find_model("gpt-oss-120b")
    renamed = dataclasses.replace(model, name="mine", num_layers=2)
    assert "lognormal_1.35" == counted_routing(model) == counted_routing(renamed)
    for name in ("gpt-oss-20b", "mixtral-8x7b", "llama-3.1-8b"):
        assert "uniform" == counted_routing(find_model(name))


def test_drawn_experts_are_as_many_as_tokens_draw() -> None:
    """The closed form, against tokens that draw until they have four different experts."""
    routing = ExpertRouting(top_k=4, num_experts=128, name="lognormal_1.35")
    random, num_layers = np.random.default_rng(1), 300
    for num_tokens in (4, 16, 64):
        popularity = 1.35 * random.normal(size=(num_layers, 1, 128))
        drawn = popularity + random.gumbel(size=(num_layers, num_tokens, 128))
        chosen = np.argsort(-drawn, axis=2)[:, :, :4].reshape(num_layers, -1)
        active = np.mean([len(np.unique(experts)) for experts in chosen])
        assert pytest.approx(active, rel=0.04) == expert_load(num_tokens, routing).num_active


def test_equally_popular_experts_are_hit_as_if_balanced() -> None:
    even, drawn = (
        ExpertRouting(top_k=4, num_experts=128, name=name) for name in ("uniform", "lognormal_0")
    )
    for num_tokens in (1, 8, 64, 1000):
        expected = expert_load(num_tokens, even).num_active
        assert pytest.approx(expected, abs=1) == expert_load(num_tokens, drawn).num_active


def test_popular_experts_fill_one_rank_more_unless_they_are_placed() -> None:
    ranks = ExpertRouting(top_k=4, num_experts=128, num_ranks=8, name="lognormal_1.35")
    placed = dataclasses.replace(ranks, is_placed=True)
    mean = 1024 * 4 / 8
    assert 1.5 * mean < expert_load(1024, ranks).num_pairs
    assert 1.1 * mean > expert_load(1024, placed).num_pairs >= mean


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(128, 8), (256, 2), (256, 64)])
@pytest.mark.parametrize("num_tokens", [4, 64, 512])
def test_the_busiest_rank_of_experts_that_are_all_as_likely_is_as_tokens_draw(
    num_tokens: int, num_experts: int, num_ranks: int
) -> None:
    random, num_layers = np.random.default_rng(1), 40
    keys = random.random((num_layers, num_tokens, num_experts))
    ranks = np.argpartition(keys, 8, axis=2)[:, :, :8] // (num_experts // num_ranks)
    counts = np.array([np.bincount(drawn.reshape(-1), minlength=num_ranks) for drawn in ranks])
    expected = counts.max(axis=1).mean()
    routing = ExpertRouting(top_k=8, num_experts=num_experts, num_ranks=num_ranks, name="uniform")
    even = dataclasses.replace(routing, name="balanced")
    found = expert_load(num_tokens, routing).num_pairs
    assert pytest.approx(expected, rel=0.1, abs=0.8) == found
    assert found > expert_load(num_tokens, even).num_pairs


@pytest.mark.parametrize("name", ["balanced", "uniform", "power_law_1.2", "lognormal_1.35"])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_column_is_as_its_rows(name: str, num_ranks: int) -> None:
    routing = ExpertRouting(top_k=8, num_experts=128, num_ranks=num_ranks, name=name)
    tokens = np.array([1, 3, 64, 5000])
    load = expert_load(tokens, routing, 1.25)
    rows = [expert_load(int(count), routing, 1.25) for count in tokens]
    assert [row.num_pairs for row in rows] == load.num_pairs.tolist()
    assert [row.num_active for row in rows] == load.num_active.tolist()
    assert all(1 <= row.num_active <= min(row.num_pairs, 128 // num_ranks) for row in rows)


def test_all_pairs_are_on_the_only_rank() -> None:
    for name in ("", "uniform", "balanced", "power_law_1.01", "lognormal_1.35"):
        routing = ExpertRouting(top_k=8, num_experts=64, name=name)
        assert 800 == expert_load(100, routing).num_pairs


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="moe_routing"):
        expert_load(8, ExpertRouting(top_k=2, num_experts=8, name="zipf"))


def test_whole_numbers() -> None:
    assert (3, 2) == (rounded(2.5), rounded(2.49))
    assert (7, 7) == (larger(3, 7), larger(7, 3))


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_places", "most"),
    [(8, 3, 4, 0), (8, 3, 2, 0), (9, 4, 3, 0), (6, 2, 6, 0), (8, 3, 4, 2), (12, 4, 4, 3)],
)
def test_a_token_goes_to_as_many_places_as_all_choices_do_on_average(
    num_experts: int, top_k: int, num_places: int, most: int
) -> None:
    """By counting the places of every set of experts, of every set of places that are open."""
    num_local = num_experts // num_places
    counts = [
        len({expert // num_local for expert in chosen})
        for places in combinations(range(num_places), most or num_places)
        for chosen in combinations(
            [expert for expert in range(num_experts) if expert // num_local in places], top_k
        )
    ]
    routing = ExpertRouting(top_k=top_k, num_experts=num_experts)
    assert np.mean(counts) == pytest.approx(count_places(routing, num_places, most))


@given(
    st.integers(0, 5), st.integers(0, 4), st.integers(1, 8), st.integers(1, 64), st.integers(0, 7)
)
def test_more_places_are_reached_where_there_are_more_but_never_more_than_experts(
    octaves: int, more: int, num_local: int, top_k: int, limit: int
) -> None:
    """Nor more than there are, or than a token may go to, if those have enough experts."""
    num_places, num_parts = 2**octaves, 2**more
    num_experts = num_places * num_parts * num_local
    top_k = min(top_k, num_experts)
    routing = ExpertRouting(top_k=top_k, num_experts=num_experts)
    few, many = count_places(routing, num_places), count_places(routing, num_places * num_parts)
    assert 1 - 1e-9 <= few <= many * (1 + 1e-9) <= min(top_k, num_places * num_parts) * (1 + 2e-9)
    limited = count_places(routing, num_places, limit)
    assert limited <= few * (1 + 1e-9)
    if limit * num_parts * num_local >= top_k:
        assert limited <= limit


_loads = st.lists(st.integers(0, 10**6), min_size=1, max_size=12)


@given(_loads, st.integers(1, 6), st.integers(0, 3))
def test_a_balancer_gives_every_rank_as_many_experts_and_all_tokens(
    loads: list[int], num_ranks: int, more: int
) -> None:
    num_redundant = -len(loads) % num_ranks + more * num_ranks
    ranks = place_balanced(loads, num_ranks, num_redundant)
    assert [(len(loads) + num_redundant) // num_ranks] * num_ranks == [len(rank) for rank in ranks]
    assert sum(loads) == pytest.approx(sum(map(sum, ranks)))
    # The busiest expert has at most its part where all copies are its own.
    assert max(map(max, ranks)) <= max(loads)
    assert max(loads) <= max(map(max, ranks)) * (1 + num_redundant)


@given(_loads, st.integers(0, 12))
def test_copies_take_tokens_from_the_busiest_expert(loads: list[int], num_redundant: int) -> None:
    one_by_one = [max(place_balanced(loads, 1, count)[0]) for count in range(num_redundant + 1)]
    assert sorted(one_by_one, reverse=True) == one_by_one


@given(st.lists(st.integers(0, 10**6), min_size=8, max_size=8))
def test_without_copies_a_rank_an_expert_is_as_in_order(loads: list[int]) -> None:
    assert sorted(place_in_order(loads, 8)) == sorted(place_balanced(loads, 8, 0))


@pytest.mark.parametrize("num_tokens", [64, 512, 8192])
def test_a_balancer_takes_the_imbalance_of_a_power_law_away(num_tokens: int) -> None:
    """DeepSeek-V3's experts on 32 ranks, with the 32 copies that its report serves it with."""
    in_order = ExpertRouting(top_k=8, num_experts=256, num_ranks=32, name="power_law_1.2")
    placed = dataclasses.replace(in_order, is_placed=True)
    with_copies = dataclasses.replace(placed, num_redundant=32)
    mean = num_tokens * 8 / 32
    loads = [expert_load(num_tokens, it).num_pairs for it in (with_copies, placed, in_order)]
    assert mean <= loads[0] <= loads[1] < loads[2]
    assert loads[0] - mean < (loads[2] - mean) / 4
