"""Tests of single routers against choices made by hand."""

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, find_router

_IDLE = EngineLoad(0, 0)


def _prompt(*blocks: int, num_tokens: int = 0) -> RoutedRequest:
    names = np.array(blocks, dtype=np.int64)
    return RoutedRequest(
        0, num_tokens or 16 * len(blocks), block_tokens=16, read_blocks=lambda _: names
    )


def test_round_robin_passes_over_engines_that_are_gone() -> None:
    """An engine that is not there loses its turn; one that comes back gets it again."""
    router = find_router("round_robin")({}, 0)
    given = [(0, 1, 2), (0, 2), (0, 2), (0, 1, 2), (1, 2)]
    loads = dict.fromkeys(range(3), _IDLE)
    assert [0, 2, 0, 1, 2] == [router.choose(_prompt(), engines, loads) for engines in given]


def test_a_waiting_request_weighs_four_running_ones() -> None:
    """Five running are more than one waiting, three are less; another weight changes that."""
    loads = {0: EngineLoad(1, 0), 1: EngineLoad(0, 5), 2: EngineLoad(0, 3)}
    router = find_router("least_loaded")({}, 0)
    assert [0, 2] == [router.choose(_prompt(), engines, loads) for engines in ((0, 1), (0, 2))]
    lighter = find_router("least_loaded")({"waiting_weight": "1"}, 0)
    assert 0 == lighter.choose(_prompt(), (0, 2), loads)


def test_random_and_power_of_two_reach_every_engine() -> None:
    """With equal loads each of four engines gets about a quarter of many requests."""
    engines, loads = range(4), dict.fromkeys(range(4), _IDLE)
    for name in ("random", "power_of_two"):
        router = find_router(name)({}, 7)
        chosen = [router.choose(_prompt(), engines, loads) for _ in range(4000)]
        # Five standard deviations of a binomial of 4000 and 1/4 are 137.
        assert np.abs(np.bincount(chosen, minlength=4) - 1000).max() < 137


def test_power_of_two_balances_better_than_random() -> None:
    """Balls into bins: the fullest of 200 bins with 200 balls holds fewer with two choices."""
    fullest = {}
    for name in ("random", "power_of_two"):
        counts, router = np.zeros(200, dtype=int), find_router(name)({}, 3)
        for _ in range(200):
            loads = {engine: EngineLoad(0, int(count)) for engine, count in enumerate(counts)}
            counts[router.choose(_prompt(), range(200), loads)] += 1
        fullest[name] = counts.max()
    assert fullest["power_of_two"] < fullest["random"]


def test_a_prompt_goes_where_most_of_it_was_sent() -> None:
    """Two of three blocks match on engine 1, one on engine 0; a short match goes to the least."""
    router = find_router("prefix_affinity")({}, 0)
    idle, busy = _IDLE, EngineLoad(0, 9)
    router.choose(_prompt(1, 5, 5), (0, 1), {0: idle, 1: busy})
    router.choose(_prompt(1, 2, 3), (1,), {1: busy})
    assert 1 == router.choose(_prompt(1, 2, 7), (0, 1), {0: idle, 1: busy})
    # One block of four is a quarter, less than 0.3 of the prompt.
    assert 0 == router.choose(_prompt(9, 9, 9, 9), (0, 1), {0: idle, 1: busy})
    assert 1 == router.choose(_prompt(9, 8, 8, 8), (0, 1), {0: busy, 1: idle})


def test_affinity_ends_where_loads_are_out_of_balance() -> None:
    """Above 64 requests more, and 1.5 times as many, the prompt goes to the idlest engine."""
    chosen = []
    for most in (64, 65):
        router = find_router("prefix_affinity")({}, 0)
        router.choose(_prompt(1, 2), (0,), {0: _IDLE})
        loads = {0: EngineLoad(0, most), 1: _IDLE}
        chosen.append(router.choose(_prompt(1, 2), (0, 1), loads))
    assert [0, 1] == chosen
    # 300 are 100 more than 200, but only 1.5 times as many.
    router = find_router("prefix_affinity")({}, 0)
    router.choose(_prompt(1, 2), (0,), {0: _IDLE})
    loads = {0: EngineLoad(0, 300), 1: EngineLoad(0, 200)}
    assert 0 == router.choose(_prompt(1, 2), (0, 1), loads)


def test_a_session_whose_engine_failed_stays_at_its_new_one() -> None:
    """It does not go back when the old engine is there again."""
    router = find_router("session_sticky")({}, 0)
    request = RoutedRequest(0, 10, session=4)
    loads = {0: _IDLE, 1: EngineLoad(0, 5)}
    given = [(0, 1), (1,), (0, 1)]
    assert [0, 1, 1] == [router.choose(request, engines, loads) for engines in given]


def test_wrong_options_say_what_there_is() -> None:
    """An unknown name lists the known ones, a bad value says what it must be, a router its like."""
    with pytest.raises(InvalidRequestError, match="knows: waiting_weight"):
        find_router("least_loaded")({"weight": "4"}, 0)
    with pytest.raises(InvalidRequestError, match=r"routing.options.match_ratio.*from 0 to 1"):
        find_router("prefix_affinity")({"match_ratio": "3"}, 0)
    with pytest.raises(InvalidRequestError, match="expected a number, found 'much'"):
        find_router("prefix_affinity")({"balance_ratio": "much"}, 0)
    with pytest.raises(UnknownPluginError, match="round_robin"):
        find_router("round_robbin")
