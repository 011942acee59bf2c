"""Tiers below the device: links with queues, least recently used blocks, requests swapped out."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.engine import layout, tier
from foretoken.simulator.engine.layout import Records
from foretoken.simulator.engine.state import build_state
from foretoken.simulator.jit import compiled
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import plan_requests

_BLOCK_BYTES = 1000
# A block takes so long up and down the link of a tier, in ns.
_READ_NS, _WRITE_NS = 1_000, 4_000


def _tier(num_blocks: int, slower: int = 1) -> KvTier:
    return KvTier(
        name="tier",
        capacity_bytes=num_blocks * _BLOCK_BYTES + 1,
        read_bytes_per_s=1e9 / slower,
        write_bytes_per_s=0.25e9 / slower,
    )


class _Store:
    """The tiers below one engine, by the functions that the engine calls."""

    def __init__(self, tiers: Sequence[KvTier]) -> None:
        rules = {"has_prefix_caching": True, "preemption": "swap", "block_size": 1}
        setup = DeploymentSetup(
            profile=EngineProfile(name="plain", engine="plain", **rules),
            num_kv_blocks=100,
            kv_bytes_per_token=_BLOCK_BYTES,
            kv_tiers=tuple(tiers),
        )
        many = np.full(1, 1000)
        self._state = build_state(plan_requests(0 * many, many, many), setup, flat_tables())

    def _at(self, now_ns: int) -> Records:
        self._state.record["now_ns"] = now_ns
        return self._state.record

    def has(self, name: int) -> bool:
        """Whether a tier keeps a block of that content."""
        return _find(self._at(0), name) != layout.NONE

    def put(self, name: int, now_ns: int) -> None:
        """Keep a block that the device gives up."""
        _keep(self._at(now_ns), name)

    def load(self, names: Sequence[int], now_ns: int) -> int:
        """Read blocks that are kept; return when all are on the device."""
        places = [_find(self._at(now_ns), name) for name in names]
        return max(_load(self._at(now_ns), place) for place in places)

    def can_swap_out(self, num_blocks: int) -> bool:
        """Whether the first tier has room for a request."""
        return bool(_can_swap_out(self._at(0), num_blocks))

    def swap_out(self, num_blocks: int, now_ns: int) -> None:
        """Write the blocks of a request to the first tier."""
        _swap_out(self._at(now_ns), num_blocks)

    def swap_in(self, num_blocks: int, now_ns: int) -> int:
        """Read them back; return when they are there."""
        return int(_swap_in(self._at(now_ns), num_blocks))


@compiled
def _find(states: Records, name: int) -> int:
    return tier.find_stored(states[0], 0, name)


@compiled
def _keep(states: Records, name: int) -> None:
    tier.keep_block(states[0], 0, name)


@compiled
def _load(states: Records, place: int) -> int:
    return tier.load_block(states[0], 0, place)


@compiled
def _can_swap_out(states: Records, num_blocks: int) -> bool:
    return tier.can_swap_out(states[0], 0, num_blocks)


@compiled
def _swap_out(states: Records, num_blocks: int) -> None:
    tier.swap_out(states[0], 0, num_blocks)


@compiled
def _swap_in(states: Records, num_blocks: int) -> int:
    return tier.swap_in(states[0], 0, num_blocks)


def _store(*num_blocks: int) -> _Store:
    """Return a store of tiers with room for so many blocks, each ten times slower than before."""
    return _Store([_tier(count, 10**level) for level, count in enumerate(num_blocks)])


def test_loads_queue_on_the_link_of_their_tier() -> None:
    """The second request waits for the first one's two blocks; the link is idle in between."""
    store = _store(8)
    for name in (1, 2, 3):
        store.put(name, 0)
    later = 100_000
    assert later + 2 * _READ_NS == store.load([1, 2], later)
    assert later + 3 * _READ_NS == store.load([3], later)
    assert 2 * later + _READ_NS == store.load([1], 2 * later)


def test_a_block_is_read_when_it_has_been_written() -> None:
    """Writes queue as well, on the other direction of the link."""
    store = _store(8)
    store.put(1, 0)
    store.put(2, 0)
    assert 2 * _WRITE_NS + _READ_NS == store.load([2], 0)


def test_a_full_tier_hands_its_longest_unused_block_to_the_next() -> None:
    """Of three blocks the second is the longest unused, as the first was read again."""
    store = _store(2, 2)
    store.put(1, 0)
    store.put(2, 0)
    store.load([1], 0)
    store.put(3, 0)
    late = 1_000_000
    assert late + 2 * _READ_NS == store.load([1, 3], late)
    assert late + 10 * _READ_NS == store.load([2], late)


def test_what_falls_out_of_the_last_tier_is_lost() -> None:
    """Room for one and one: of three blocks the first put is gone."""
    store = _store(1, 1)
    for name in (1, 2, 3):
        store.put(name, 0)
    assert [False, True, True] == [store.has(name) for name in (1, 2, 3)]


def test_a_block_that_is_kept_is_not_written_again_but_counts_as_used() -> None:
    store = _store(2)
    store.put(1, 0)
    store.put(2, 0)
    store.put(1, 1_000_000)
    store.put(3, 1_000_000)
    assert [True, False, True] == [store.has(name) for name in (1, 2, 3)]
    assert 1_000_000 + _READ_NS == store.load([1], 1_000_000)


def test_a_tier_without_room_for_a_block_is_passed_over() -> None:
    store = _store(0, 1)
    store.put(1, 0)
    assert store.has(1)
    assert 1_000_000 + 10 * _READ_NS == store.load([1], 1_000_000)


def test_a_swapped_request_is_back_after_its_blocks_were_written_and_read() -> None:
    store = _store(8)
    store.swap_out(3, 0)
    assert 3 * _WRITE_NS + 3 * _READ_NS == store.swap_in(3, 0)


def test_swapped_requests_drive_kept_blocks_to_the_next_tier() -> None:
    """They take the first tier alone, and room for more is refused."""
    store = _store(3, 8)
    for name in (1, 2, 3):
        store.put(name, 0)
    assert store.can_swap_out(3)
    store.swap_out(2, 0)
    late = 1_000_000
    assert not store.can_swap_out(2)
    assert late + _READ_NS == store.load([3], late)
    assert late + 20 * _READ_NS == store.load([1, 2], late)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_swapping_in_gives_back_all_the_room_that_swapping_out_took(sizes: list[int]) -> None:
    """Whatever is swapped out and in, the room of the first tier is conserved."""
    store, held = _store(7), []
    for now_ns, size in enumerate(sizes):
        if store.can_swap_out(size):
            store.swap_out(size, now_ns)
            held.append(size)
        elif held:
            store.swap_in(held.pop(0), now_ns)
        assert store.can_swap_out(7 - sum(held))
        assert not store.can_swap_out(8 - sum(held))


@given(st.lists(st.integers(1, 9), max_size=40))
def test_a_tier_keeps_the_blocks_that_were_used_last(names: list[int]) -> None:
    store = _store(3)
    for now_ns, name in enumerate(names):
        store.put(name, now_ns)
    used = list(dict.fromkeys(reversed(names)))
    assert set(used[:3]) == {name for name in range(1, 10) if store.has(name)}
