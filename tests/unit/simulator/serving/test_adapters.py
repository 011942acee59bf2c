"""Tests of which request uses which adapter, and of the adapters an engine holds."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.engine.layout import NEVER_NS
from foretoken.simulator.serving.lora import AdapterCache, adapter_load_ns, assign_adapters
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

_LOAD_NS = 10


def _plan(num_requests: int) -> RequestPlan:
    ones = np.ones(num_requests, dtype=np.int64)
    return plan_requests(np.arange(num_requests), ones, ones)


def test_adapters_are_asked_for_by_popularity() -> None:
    """With spread 1 the k-th of three is asked for 1/k as often: 6, 3 and 2 of eleven."""
    spec = LoraSpec(num_adapters=3, popularity_spread=1.0)
    adapter = assign_adapters(_plan(11_000), spec, 5).adapter
    assert adapter is not None
    counts = np.bincount(adapter, minlength=3)
    # Five standard deviations of a binomial are at most 262.
    assert np.abs(counts - [6000, 3000, 2000]).max() < 262


def test_no_adapters_leave_a_plan_as_it_is() -> None:
    """Without adapters the plan is the same object, and names none."""
    plan = _plan(3)
    assert plan is assign_adapters(plan, None, 0)
    assert plan.adapter is None


@given(
    streams=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    num_adapters=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_text_is_shared_under_one_adapter_alone(
    streams: list[int], num_adapters: int, seed: int
) -> None:
    """A session keeps its adapter; prefixes and hashes are equal where they and adapters were."""
    num = len(streams)
    prefix = np.array([stream % 2 - 1 for stream in streams])
    hashes = np.arange(2 * num) % 3
    plan = replace(
        _plan(num),
        stream=np.array(streams),
        prefix_stream=prefix,
        hash_offsets=2 * np.arange(num + 1),
        hashes=hashes,
    )
    apart = assign_adapters(plan, LoraSpec(num_adapters=num_adapters), seed)
    adapter = apart.adapter
    assert adapter is not None
    assert ((adapter >= 0) & (adapter < num_adapters)).all()
    for i in range(num):
        for j in range(num):
            if streams[i] == streams[j]:
                assert adapter[i] == adapter[j]
            is_same = prefix[i] == prefix[j] and (prefix[i] < 0 or adapter[i] == adapter[j])
            assert is_same == (apart.prefix_stream[i] == apart.prefix_stream[j])
            is_same = hashes[2 * i] == hashes[2 * j] and adapter[i] == adapter[j]
            assert is_same == (apart.hashes[2 * i] == apart.hashes[2 * j])


def test_an_adapter_loads_at_the_rate_of_its_link() -> None:
    """Two bytes x rank x widths of Llama-3.1-8B are 83,886,080 B at rank 16: 3.36 ms at 25 GB/s."""
    lora = LoraSpec(num_adapters=1, rank=16)
    rank = RankContext(
        model=find_model("llama-3.1-8b"), layout=ParallelLayout(), devices_per_node=8
    )
    load_ns = adapter_load_ns(lora, LoweringOptions(dtype=DType.BF16), [rank])
    assert round(83_886_080 / 25e9 * 1e9) == load_ns


def test_adapters_load_one_after_the_other() -> None:
    """Two requests for one adapter share its load; another waits for the link."""
    cache = AdapterCache(max_loaded=2, load_ns=_LOAD_NS)
    for request, adapter in ((0, 7), (1, 8), (2, 7)):
        cache.ask(request, adapter, 0)
    assert ([], 10, 3) == (cache.take_ready(0), cache.next_ns, cache.num_waiting)
    assert ([0, 2], 20, 1) == (cache.take_ready(10), cache.next_ns, cache.num_waiting)
    assert ([1], NEVER_NS, 0) == (cache.take_ready(20), cache.next_ns, cache.num_waiting)
    assert 2 == cache.num_loads


def test_an_adapter_in_use_does_not_give_way() -> None:
    """The third adapter waits until one of two is free; then the unused one goes."""
    cache = AdapterCache(max_loaded=2, load_ns=_LOAD_NS)
    cache.ask(0, 7, 0)
    cache.take_ready(10)
    cache.ask(1, 8, 10)
    cache.take_ready(20)
    cache.ask(2, 9, 20)
    assert (NEVER_NS, frozenset({7, 8})) == (cache.next_ns, cache.held)
    cache.release(1, 50)
    assert (60, frozenset({7, 9})) == (cache.next_ns, cache.held)
    # One that is there passes what waits.
    cache.ask(3, 7, 55)
    assert [3] == cache.take_ready(55)


def test_a_failed_engine_forgets_its_adapters() -> None:
    """What was there has to load again; requests that waited are counted."""
    cache = AdapterCache(max_loaded=1, load_ns=_LOAD_NS)
    cache.ask(0, 7, 0)
    cache.take_ready(10)
    cache.ask(1, 8, 10)
    assert [1] == cache.clear()
    assert (frozenset(), 0, NEVER_NS) == (cache.held, cache.num_waiting, cache.next_ns)
    cache.ask(0, 7, 100)
    assert [0] == cache.take_ready(110)


@given(
    events=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 4), st.booleans()), max_size=60),
    max_loaded=st.integers(1, 3),
)
def test_a_cache_holds_its_limit_and_starts_everyone(
    events: list[tuple[int, int, bool]], max_loaded: int
) -> None:
    """Never more than fit; adapters of started requests stay; when all leave, all have started.

    Each request starts once, not before a load's time has passed since its adapter was last
    absent.
    """
    cache, now_ns = AdapterCache(max_loaded, _LOAD_NS), 0
    running: OrderedDict[int, int] = OrderedDict()
    adapter_of: dict[int, int] = {}
    started: list[int] = []

    def look() -> None:
        for request in cache.take_ready(now_ns):
            started.append(request)
            running[request] = adapter_of[request]
        assert len(cache.held) <= max_loaded
        assert set(running.values()) <= cache.held
        assert len(adapter_of) - len(started) == cache.num_waiting

    def leave() -> None:
        if running:
            cache.release(running.popitem(last=False)[0], now_ns)

    for gap_ns, adapter, is_release in events:
        end_ns = now_ns + gap_ns
        while cache.next_ns <= end_ns:
            now_ns = cache.next_ns
            look()
        now_ns = end_ns
        if is_release:
            leave()
        else:
            adapter_of[len(adapter_of)] = adapter
            cache.ask(len(adapter_of) - 1, adapter, now_ns)
        look()
    while running or cache.next_ns < NEVER_NS:
        now_ns = max(now_ns, min(cache.next_ns, now_ns + 1))
        leave()
        look()
        if cache.next_ns < NEVER_NS:
            now_ns = cache.next_ns
            look()
    assert sorted(adapter_of) == sorted(started)
    assert cache.num_loads >= len(set(adapter_of.values()))
