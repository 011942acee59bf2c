"""How long prompts wait on prefill replicas, against a server that computes what has come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.units import US_PER_S
from foretoken.simulator.search.serving.prompt_queue import (
    PromptPasses,
    busiest_rps,
    random_wait_us,
)

_ONE = np.array([1])
_COSTS = st.floats(min_value=1.0, max_value=1e5)
_LOADS = st.floats(min_value=0.01, max_value=0.95)
_MOST = st.floats(min_value=0.1, max_value=64.0)


def _passes(fixed_us: float, marginal_us: float, most: float) -> PromptPasses:
    """Return passes of a cost; a prompt is cut into pieces where `most` is below one."""
    single_us = fixed_us / min(most, 1.0) + marginal_us
    return PromptPasses(
        alone_us=np.array([[single_us]]),
        single_us=np.array([[single_us]]),
        each_us=np.array([[fixed_us / most + marginal_us]]),
        most=np.array([[most]]),
    )


def _serve(passes: tuple[float, float, int], rate_rps: float, num: int = 40_000) -> float:
    """Return how much longer prompts take than alone, coming at random to one server."""
    fixed_us, marginal_us, most = passes
    came_us = np.cumsum(np.random.default_rng(1).exponential(US_PER_S / rate_rps, num))
    total_us, first, free_us = 0.0, 0, 0.0
    while first < num:
        start_us = max(free_us, float(came_us[first]))
        end = min(int(np.searchsorted(came_us, start_us, side="right")), first + most)
        free_us = start_us + fixed_us + marginal_us * (end - first)
        total_us += float((free_us - came_us[first:end]).sum())
        first = end
    return total_us / num - fixed_us - marginal_us


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(
    ("fixed_us", "marginal_us"), [(0.0, 1000.0), (200.0, 1000.0), (1000.0, 1000.0), (1000.0, 50.0)]
)
def test_prompts_wait_as_before_a_server_that_takes_all_that_came(
    fixed_us: float, marginal_us: float, load: float
) -> None:
    """Within a tenth of what a prompt takes, whatever of a pass each prompt adds."""
    passes = _passes(fixed_us, marginal_us, 64.0)
    rate = load * passes.full_rps

    found = float(random_wait_us(passes, rate, 1.0, _ONE)[0, 0])

    expected = _serve((fixed_us, marginal_us, 64), float(rate[0, 0]))
    whole_us = fixed_us + marginal_us + expected
    assert found == pytest.approx(expected, abs=0.1 * whole_us)


@pytest.mark.parametrize("most", [2, 4, 8])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
def test_passes_are_not_counted_full_at_any_load(most: int, load: float) -> None:
    """Passes of long prompts, of which few wait: within a fifth of what a prompt takes."""
    passes = _passes(50.0, 1000.0, float(most))
    rate = load * passes.full_rps

    found = float(random_wait_us(passes, rate, 1.0, _ONE)[0, 0])

    expected = _serve((50.0, 1000.0, most), float(rate[0, 0]))
    assert found == pytest.approx(expected, abs=0.2 * (1050.0 + expected))


@given(_COSTS, _LOADS, st.floats(min_value=1.0, max_value=4.0))
def test_one_prompt_at_a_time_waits_as_pollaczek_and_khinchine_say(
    cost_us: float, load: float, second_ratio: float
) -> None:
    """M/G/1: half the spread of a service for each that is ahead."""
    passes = _passes(0.0, cost_us, 1.0)

    found = random_wait_us(passes, load * passes.full_rps, second_ratio, _ONE)

    assert float(found[0, 0]) == pytest.approx(cost_us * second_ratio / 2 * load / (1 - load))


@given(_COSTS, _COSTS, _MOST, _LOADS, st.integers(min_value=1, max_value=8))
def test_more_load_never_waits_less_and_more_replicas_never_longer(
    fixed_us: float, marginal_us: float, most: float, load: float, num: int
) -> None:
    """At the same load of each replica, and at less of it."""
    passes = _passes(fixed_us, marginal_us, most)
    rate = load * passes.full_rps

    found = float(random_wait_us(passes, rate, 1.3, np.array([num]))[0, 0])

    assert found >= 0.0
    assert found >= float(random_wait_us(passes, rate * 0.9, 1.3, np.array([num]))[0, 0])
    assert found >= float(random_wait_us(passes, rate, 1.3, np.array([num + 1]))[0, 0]) * (1 - 1e-9)


@given(_COSTS, _COSTS, _MOST, st.floats(min_value=0.01, max_value=100.0))
def test_the_most_that_is_carried_just_waits_as_long_as_it_may(
    fixed_us: float, marginal_us: float, most: float, share: float
) -> None:
    """At the rate found prompts are in time, at slightly more they are not."""
    passes = _passes(fixed_us, marginal_us, most)
    left_us = passes.alone_us * share

    found = busiest_rps(passes, 1.3, left_us)

    assert (random_wait_us(passes, found, 1.3, _ONE) <= left_us).all()
    more = found + 1e-5 * passes.full_rps
    assert (random_wait_us(passes, more, 1.3, _ONE) >= left_us * (1 - 1e-9)).all()
