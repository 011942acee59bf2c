"""Blocks the device gave up and that come back: engines above tiers of memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

_BLOCK = 4
_BYTES_PER_TOKEN = 250
# A block of 1,000 bytes takes a millisecond up and down.
_TIER = KvTier(name="cpu", capacity_bytes=100_000, read_bytes_per_s=1e6, write_bytes_per_s=1e6)
_BLOCK_NS = 1_000_000


def _plan(streams: list[int], prompt: int, answer: int, gap_ns: int = 0) -> RequestPlan:
    """Return requests of equal length; those of one stream have one content."""
    ones = np.ones(len(streams), dtype=np.int64)
    plan = plan_requests(np.arange(len(streams)) * gap_ns, prompt * ones, answer * ones)
    return replace(plan, stream=np.array(streams))


def _run(
    plan: RequestPlan,
    num_blocks: int,
    tiers: tuple[KvTier, ...],
    **rules: Any,
) -> ServingRecord:
    num_engines = rules.pop("num_engines", 1)
    rules = {"block_size": _BLOCK, "has_prefix_caching": True, **rules}
    profile = replace(find_engine("plain"), **rules)
    setup = DeploymentSetup(
        profile=profile,
        num_kv_blocks=num_blocks,
        num_engines=num_engines,
        kv_bytes_per_token=_BYTES_PER_TOKEN,
        kv_tiers=tiers,
    )
    return run_deployment(plan, setup, flat_tables(), lambda _: None)


def test_evicted_blocks_come_back_from_their_tier() -> None:
    """The second content takes the place of the first, which is then read block by block."""
    plan = _plan([1, 2, 1], 17, 1, gap_ns=10**9)
    requests = _run(plan, 5, (_TIER,)).requests
    assert [0, 0, 16] == requests.num_cached_tokens.tolist()
    assert [0, 0, 16] == requests.num_loaded_tokens.tolist()
    assert 4 * _BLOCK_NS == requests.scheduled_ns[2] - requests.queued_ns[2]


def test_blocks_on_the_device_are_not_read_from_the_tier() -> None:
    """One block of the first content was taken for another: the last, as it was freed first."""
    lengths = {"num_prefill_tokens": np.array([13, 5, 13])}
    plan = replace(_plan([1, 2, 1], 13, 1, gap_ns=10**9), **lengths)
    requests = _run(plan, 4, (_TIER,)).requests
    assert (12, 4) == (requests.num_cached_tokens[2], requests.num_loaded_tokens[2])


def test_a_tier_turns_prefixes_that_were_lost_into_hits() -> None:
    """Two contents in turn, room for one: without a tier neither is ever found again."""
    plan = _plan([1, 2, 1, 2], 40, 2, gap_ns=10**9)
    lost, kept = (_run(plan, 11, tiers) for tiers in ((), (_TIER,)))
    assert [0, 0, 0, 0] == lost.requests.num_cached_tokens.tolist()
    assert [0, 0, 36, 36] == kept.requests.num_loaded_tokens.tolist()
    waited = kept.requests.first_token_ns[2] - kept.requests.arrival_ns[2]
    assert 9 * _BLOCK_NS <= waited


def test_who_arrives_while_an_idle_engine_loads_is_served_at_once() -> None:
    """The third request waits for its blocks; the fourth needs none and does not wait for them."""
    plan = replace(
        _plan([1, 2, 1, 3], 40, 2, gap_ns=10**9),
        num_prefill_tokens=np.array([40, 80, 40, 40]),
        arrival_ns=np.array([0, 10**9, 2 * 10**9, 2 * 10**9 + _BLOCK_NS]),
    )
    requests = _run(plan, 22, (_TIER,)).requests
    alone = _run(_plan([3], 40, 2), 22, (_TIER,)).requests
    assert 0 < requests.num_loaded_tokens[2]
    assert alone.first_token_ns[0] == requests.first_token_ns[3] - requests.arrival_ns[3]
    assert requests.first_token_ns[3] < requests.first_token_ns[2]


@pytest.mark.parametrize("scheduler", ["chunked_prefill", "vllm_v0", "sarathi"])
def test_swapping_conserves_blocks_and_computes_no_prompt_again(scheduler: str) -> None:
    """Two answers outgrow the cache: with a tier the prompts are computed once all the same."""
    plan = _plan([1, 2], 16, 40)
    rules = {"scheduler": scheduler, "has_prefix_caching": False}
    swapped = _run(plan, 20, (_TIER,), preemption="swap", **rules)
    again = _run(plan, 20, (), **rules)
    for record in (swapped, again):
        assert [RequestOutcome.COMPLETED] * 2 == record.requests.outcome.tolist()
        assert record.requests.num_preemptions.sum() > 0
        assert record.steps[0].num_used_blocks.max() <= 20
    assert 32 == swapped.steps[0].prefill_tokens.sum()
    assert 32 < again.steps[0].prefill_tokens.sum()


_STORE = replace(_TIER, name="store", is_shared=True)


def test_replicas_find_in_a_shared_store_what_others_have_computed() -> None:
    """Requests take turns on two engines: the second of a content reads it over its own link."""
    plan = _plan([1, 1, 1], 17, 1, gap_ns=10**9)
    own, shared = (_run(plan, 20, tiers, num_engines=2).requests for tiers in ((_TIER,), (_STORE,)))
    assert [0, 1, 0] == shared.engine.tolist()
    assert [0, 0, 16] == own.num_cached_tokens.tolist()
    assert [0, 16, 16] == shared.num_cached_tokens.tolist()
    # The third is on the engine that has it.
    assert [0, 16, 0] == shared.num_loaded_tokens.tolist()
    assert 4 * _BLOCK_NS == shared.scheduled_ns[1] - shared.queued_ns[1]


def test_engines_read_a_shared_store_at_the_same_time() -> None:
    """Four blocks a request: two engines wait no longer than one would."""
    arrivals = np.array([0, 10**9, 2 * 10**9, 2 * 10**9])
    plan = replace(_plan([1, 2, 2, 1], 17, 1), arrival_ns=arrivals)
    requests = _run(plan, 20, (_STORE,), num_engines=2).requests
    assert [0, 1, 0, 1] == requests.engine.tolist()
    assert [0, 0, 16, 16] == requests.num_loaded_tokens.tolist()
    waited = requests.scheduled_ns[2:] - requests.queued_ns[2:]
    assert [4 * _BLOCK_NS] * 2 == waited.tolist()


def test_a_block_is_in_a_shared_store_once_it_is_written() -> None:
    """The second request comes when its content is being written; a millisecond a block."""
    plan = _plan([1, 1], 17, 1, gap_ns=_BLOCK_NS // 2)
    requests = _run(plan, 20, (_STORE,), num_engines=2).requests
    assert 16 == requests.num_loaded_tokens[1]
    # Four are written before the last is read; links work in both directions.
    assert 5 * _BLOCK_NS <= requests.scheduled_ns[1] - requests.arrival_ns[0]


def test_a_shared_store_has_room_for_the_blocks_of_all() -> None:
    """Room for four blocks: the second content takes the place of the first."""
    store = replace(_STORE, capacity_bytes=4_000)
    requests = _run(_plan([1, 2, 3, 1], 17, 1, gap_ns=10**9), 5, (store,), num_engines=2).requests
    assert [0, 0, 0, 0] == requests.num_cached_tokens.tolist()
    larger = replace(_STORE, capacity_bytes=12_000)
    requests = _run(_plan([1, 2, 3, 1], 17, 1, gap_ns=10**9), 5, (larger,), num_engines=2).requests
    assert [0, 0, 0, 16] == requests.num_loaded_tokens.tolist()
