"""Chains cut to stages: what every method keeps to, held against every cut there is."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.simulator.search.placement.chain import Chain, Cut, find_method

_METHODS = ("even", "min_max", "dynamic", "ilp", "brute_force")
_sizes = st.integers(0, 20)


@st.composite
def _chains(draw: st.DrawFn, *, is_uniform: bool = False) -> Chain:
    """Draw a chain small enough for every cut to be looked at."""
    num_nodes = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, min(num_nodes, 4)))
    num_kinds = 1 if is_uniform else draw(st.integers(1, 3))
    kinds = draw(st.lists(st.integers(0, num_kinds - 1), min_size=num_stages, max_size=num_stages))
    changes: dict[str, Any] = {}
    if not is_uniform and draw(st.booleans()) and num_stages > 1:
        changes["transfers"] = _table(draw, num_nodes - 1, num_stages - 1)
    if not is_uniform and draw(st.booleans()):
        changes["bytes_needed"] = _table(draw, num_nodes, num_stages)
        changes["bytes_there"] = _table(draw, 1, num_stages)[0]
    return Chain.of(_table(draw, num_nodes, num_kinds), kinds, **changes)


def _table(draw: st.DrawFn, num_rows: int, num_columns: int) -> Any:
    flat = draw(st.lists(_sizes, min_size=num_rows * num_columns, max_size=num_rows * num_columns))
    return np.array(flat, dtype=np.float64).reshape(num_rows, num_columns)


def _cut(name: str, chain: Chain) -> Cut:
    return find_method(name).cut(chain)


def _least(chain: Chain) -> float:
    """Return the shortest longest stage of all cuts that fit, by adding up; infinite if none."""
    best = float("inf")
    nodes = range(chain.num_nodes)
    for inner in itertools.combinations(nodes[1:], chain.num_stages - 1):
        stages = list(itertools.pairwise((0, *inner, chain.num_nodes)))
        longest = 0.0
        for stage, (start, end) in enumerate(stages):
            cost = sum(chain.costs[node][chain.kinds[stage]] for node in nodes[start:end])
            if chain.has_transfers and end < chain.num_nodes:
                cost += chain.transfers[end - 1][stage]
            if chain.has_memory:
                needed = sum(chain.bytes_needed[node][stage] for node in nodes[start:end])
                cost = cost if needed <= chain.bytes_there[stage] else float("inf")
            longest = max(longest, cost)
        best = min(best, longest)
    return best


@given(_chains(), st.sampled_from(_METHODS))
def test_a_cut_takes_all_nodes_and_says_what_its_longest_stage_is(chain: Chain, name: str) -> None:
    cut = _cut(name, chain)
    if not cut.num_nodes:
        assert cut.longest == float("inf")
        return
    assert chain.num_nodes == sum(cut.num_nodes)
    assert chain.num_stages == len(cut.num_nodes)
    assert min(cut.num_nodes) >= 1
    ends = np.cumsum(cut.num_nodes)
    assert bool(chain.fits(ends))
    assert float(chain.stage_costs(ends).max()) == cut.longest


@given(_chains())
def test_exact_methods_find_the_best_of_all_cuts(chain: Chain) -> None:
    least = _least(chain)
    assert least == _cut("brute_force", chain).longest
    assert least == _cut("dynamic", chain).longest


@given(_chains())
def test_the_integer_program_is_as_good_as_dynamic_programming(chain: Chain) -> None:
    cut = _cut("ilp", chain)
    assert _cut("dynamic", chain).longest == pytest.approx(cut.longest)
    assert cut.note == ""


@given(_chains(is_uniform=True))
def test_filling_stages_is_exact_where_they_are_alike(chain: Chain) -> None:
    cut = _cut("min_max", chain)
    assert _cut("dynamic", chain).longest == cut.longest
    assert cut.is_optimal


@given(_chains())
def test_no_method_is_below_the_best(chain: Chain) -> None:
    least = _cut("dynamic", chain).longest
    for name in ("even", "min_max"):
        assert least <= _cut(name, chain).longest


@given(_chains(is_uniform=True), st.floats(0.01, 100))
def test_the_best_cut_scales_with_the_costs(chain: Chain, factor: float) -> None:
    scaled = Chain.of(chain.costs * factor, chain.kinds)
    expected = _cut("dynamic", chain).longest * factor
    assert pytest.approx(expected) == _cut("dynamic", scaled).longest
