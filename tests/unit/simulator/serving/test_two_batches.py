"""Engines that compute a batch in two halves hide what goes to experts behind computation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import RooflinePredictor

from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.cost.surface import LatencySurfaces, Surface
from foretoken.simulator.cost.two_batches import count_halves, waiting_ratio
from foretoken.simulator.grid import Floats

_LEAST = 32
_RULES = {"expert_exchange": "deepep_low_latency"}
_HALVES = {**_RULES, "two_batch_tokens": str(_LEAST)}


def _surfaces(rules: dict[str, str], dp: int = 32, **changes: Any) -> LatencySurfaces:
    engine = EngineSpec(profile="sglang-0.5", rules=rules, max_num_batched_tokens=512)
    scenario = ServingScenario(
        model=find_model("deepseek-v3"),
        device="h100_sxm",
        layout=ParallelLayout(dp=dp, ep=dp),
        engine=replace(engine, max_num_seqs=64),
        **changes,
    )
    return fetch_surfaces(surface_spec(scenario, 4096), RooflinePredictor())


def _us(surfaces: LatencySurfaces, surface: Surface | None) -> dict[str, Floats]:
    assert surface is not None
    return {
        group: surface.values[:, index].sum(axis=0) for index, group in enumerate(surfaces.groups)
    }


def _point(surface: Surface | None, num_tokens: int) -> int:
    assert surface is not None
    return int(np.searchsorted(surface.axes[0], num_tokens))


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.integers(1, 2),
    st.integers(1, 100),
)
def test_steps_wait_for_what_computation_does_not_hide(
    sent: float, computed: float, num_parts: int, num_layers: int
) -> None:
    ratio = waiting_ratio(
        np.array([[sent]]), np.array([[computed]]), np.array([num_parts]), num_layers
    )
    waits = float(ratio[0, 0]) * sent
    assert waits <= sent * (1 + 1e-9)
    # Neither the sum nor the longer of both is beaten.
    assert max(sent, computed) <= (computed + waits) * (1 + 1e-9)
    if num_parts == 1:
        assert waits == sent


@given(st.integers(1, 10**4), st.integers(0, 100))
def test_batches_that_are_too_small_stay_whole(num_tokens: int, least: int) -> None:
    parts = int(count_halves(np.array([num_tokens]), least)[0])
    assert (2 if least and num_tokens >= max(least, 2) else 1) == parts


def test_below_the_threshold_nothing_changes() -> None:
    whole, halves = _surfaces(_RULES), _surfaces(_HALVES)
    for name, num_tokens in (("tokens", _LEAST - 1), ("group", 32 * (_LEAST - 1))):
        one, other = getattr(whole, name), getattr(halves, name)
        point = _point(one, num_tokens)
        np.testing.assert_array_equal(one.values[..., : point + 1], other.values[..., : point + 1])


def test_two_halves_read_weights_twice_and_hide_the_network() -> None:
    """DeepSeek-V3 on four nodes, 256 tokens each: transfers take most of the step."""
    whole, halves = _surfaces(_RULES), _surfaces(_HALVES)
    point = _point(whole.group, 32 * 256)
    one, two = _us(whole, whole.group), _us(halves, halves.group)
    assert two["collective"][point] < one["collective"][point]
    assert one["moe"][point] < two["moe"][point] < 2.001 * one["moe"][point]
    total_one, total_two = (sum(us[point] for us in each.values()) for each in (one, two))
    own = _point(whole.tokens, 256)
    own_one, own_two = (
        sum(us[own] for us in _us(it, it.tokens).values()) for it in (whole, halves)
    )
    assert own_two + total_two < own_one + total_one


def test_attention_is_counted_as_in_one_batch() -> None:
    whole, halves = _surfaces(_RULES, dp=8), _surfaces(_HALVES, dp=8)
    for name in ("rows", "decode", "prefill", "mixed"):
        one, other = getattr(whole, name), getattr(halves, name)
        np.testing.assert_array_equal(one.values, other.values)


@pytest.mark.parametrize("rules", [_RULES, _HALVES])
def test_engines_alone_have_no_halves(rules: dict[str, str]) -> None:
    """Replicas that share nothing have nothing to hide."""
    scenario = ServingScenario(
        model=find_model("llama-3-8b"),
        device="h100_sxm",
        engine=EngineSpec(profile="plain", rules=rules),
    )
    assert surface_spec(scenario, 64).two_batch_tokens == 0
