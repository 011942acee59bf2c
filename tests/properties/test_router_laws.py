"""Laws of the routers: what must hold for any requests, loads and engines that come and go."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.plugins import scan_modules
from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, find_router

_ROUTERS = sorted(scan_modules("foretoken.simulator.cluster.routers", "ROUTER"))
_BLOCK_TOKENS = 16
# A request, the engines that take some now, and their loads.
_Moment = tuple[RoutedRequest, tuple[int, ...], Mapping[int, EngineLoad]]

_LOADS = st.builds(EngineLoad, st.integers(0, 200), st.integers(0, 200))
_SEEDS = st.integers(0, 2**32)
_BLOCKS = st.lists(st.integers(0, 3), max_size=6)


def _request(session: int = -1, blocks: Sequence[int] = ()) -> RoutedRequest:
    num_tokens = _BLOCK_TOKENS * len(blocks) + 1
    names = np.array(blocks, dtype=np.int64)
    return RoutedRequest(
        0, num_tokens, session, block_tokens=_BLOCK_TOKENS, read_blocks=lambda _: names
    )


@st.composite
def _moments(draw: st.DrawFn) -> _Moment:
    engines = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1))))
    request = _request(draw(st.integers(-1, 3)), draw(_BLOCKS))
    return request, engines, {engine: draw(_LOADS) for engine in engines}


@pytest.mark.parametrize("name", _ROUTERS)
@given(moments=st.lists(_moments(), max_size=12), seed=_SEEDS)
def test_every_router_chooses_an_engine_that_is_there(
    name: str, moments: Sequence[_Moment], seed: int
) -> None:
    """Whatever came before, a choice is one of the engines given."""
    router = find_router(name)({}, seed)
    for request, engines, loads in moments:
        assert router.choose(request, engines, loads) in engines


@pytest.mark.parametrize("name", _ROUTERS)
@given(moments=st.lists(_moments(), max_size=12), seed=_SEEDS)
def test_the_same_seed_chooses_the_same(name: str, moments: Sequence[_Moment], seed: int) -> None:
    """Two routers of one seed choose alike, always."""
    first, second = (find_router(name)({}, seed) for _ in range(2))
    assert [first.choose(*moment) for moment in moments] == [
        second.choose(*moment) for moment in moments
    ]


@given(
    num_requests=st.integers(0, 60),
    engines=st.sets(st.integers(0, 20), min_size=1).map(sorted),
    loads=st.lists(_LOADS, min_size=1, max_size=8),
)
def test_round_robin_is_fair(
    num_requests: int, engines: list[int], loads: list[EngineLoad]
) -> None:
    """Engines that stay get as many requests as each other, to within one, whatever their load."""
    router = find_router("round_robin")({}, 0)
    counts = Counter(
        router.choose(_request(), engines, {e: loads[(at + e) % len(loads)] for e in engines})
        for at in range(num_requests)
    )
    shares = [counts[engine] for engine in engines]
    assert max(shares) - min(shares) <= 1


@given(loads=st.dictionaries(st.integers(0, 9), _LOADS, min_size=2), seed=_SEEDS)
def test_power_of_two_never_takes_the_worst(loads: dict[int, EngineLoad], seed: int) -> None:
    """The one engine that has more than all others loses against whichever it is drawn with."""
    engines = sorted(loads)
    worst = max(load.num_outstanding for load in loads.values())
    loads[engines[0]] = EngineLoad(worst + 1, 0)
    router = find_router("power_of_two")({}, seed)
    assert {router.choose(_request(), engines, loads) for _ in range(20)} <= set(engines[1:])


@pytest.mark.parametrize("name", ["least_outstanding", "least_loaded"])
@given(loads=st.dictionaries(st.integers(0, 9), _LOADS, min_size=1))
def test_no_engine_has_less_than_the_chosen(name: str, loads: Mapping[int, EngineLoad]) -> None:
    """The chosen engine has the least, by each router's own measure."""
    weight = {"least_outstanding": 1, "least_loaded": 4}[name]
    weights = {e: weight * load.num_waiting + load.num_running for e, load in loads.items()}
    chosen = find_router(name)({}, 0).choose(_request(), sorted(loads), loads)
    assert min(weights.values()) == weights[chosen]


@given(moments=st.lists(_moments(), max_size=30))
def test_a_session_moves_only_where_its_engine_is_gone(moments: Sequence[_Moment]) -> None:
    """A session stays where it was last as long as that engine takes requests."""
    router = find_router("session_sticky")({}, 0)
    last: dict[int, int] = {}
    for request, engines, loads in moments:
        chosen = router.choose(request, engines, loads)
        before = last.get(request.session)
        if request.session >= 0 and before in engines:
            assert before == chosen
        last[request.session] = chosen


@given(
    prompts=st.lists(_BLOCKS.filter(bool), min_size=1, max_size=30),
    loads=st.data(),
    num_engines=st.integers(1, 5),
)
def test_equal_prompts_go_to_one_engine_while_loads_are_balanced(
    prompts: list[list[int]], loads: st.DataObject, num_engines: int
) -> None:
    """A prompt that was sent somewhere matches there in full, so it goes where it matches in full.

    Loads within 64 requests of each other are balanced; of several engines that match, any is.
    """
    router = find_router("prefix_affinity")({}, 0)
    engines = range(num_engines)
    sent: dict[tuple[int, ...], set[int]] = {}
    for blocks in prompts:
        now = {engine: EngineLoad(0, loads.draw(st.integers(0, 64))) for engine in engines}
        chosen = router.choose(_request(blocks=blocks), engines, now)
        # Where the prompt, or one that begins with it, was sent before.
        holders = sent.setdefault(tuple(blocks), set())
        assert not holders or chosen in holders
        for length in range(1, len(blocks) + 1):
            sent.setdefault(tuple(blocks[:length]), set()).add(chosen)


@given(prompts=st.lists(_BLOCKS, max_size=30), limit=st.integers(1, 8))
def test_a_full_record_still_holds_prompts_from_their_beginning(
    prompts: list[list[int]], limit: int
) -> None:
    """With room for the last prompt alone, that one is found, whatever was forgotten."""
    options = {"max_indexed_tokens": str(limit * _BLOCK_TOKENS), "match_ratio": "0"}
    router = find_router("prefix_affinity")(options, 0)
    for blocks in prompts:
        kept = blocks[:limit]
        where = router.choose(
            _request(blocks=blocks), (0, 1), {0: EngineLoad(0, 0), 1: EngineLoad(0, 0)}
        )
        loads = {where: EngineLoad(0, 1), 1 - where: EngineLoad(0, 0)}
        if kept:
            assert where == router.choose(_request(blocks=kept), (0, 1), loads)
