"""Memory below the device's for KV blocks: tiers in a row, each behind a link with a queue.

A tier keeps the blocks that the device gives up; a full one hands its longest unused to the next.
Requests that are swapped out take room in the first tier, before kept blocks. A store that all
engines share gets every block when it is named; each engine has a link to it of its own.
"""

from foretoken.simulator.engine.layout import NONE, State
from foretoken.simulator.engine.view import (
    engines_of,
    stored_buckets_of,
    stored_of,
    tiers_of,
)
from foretoken.simulator.jit import compiled_part


@compiled_part
def _store_of(state: State, e: int) -> int:
    """Return whose tiers an engine uses: its own, or the first one's where all share them."""
    return int(min(e, state.num_stores - 1))


@compiled_part
def find_stored(state: State, e: int, key: int) -> int:
    """Return the place of a block of that content that a tier keeps, or NONE."""
    if state.num_stored == 0:
        return NONE
    place = stored_buckets_of(state)[_bucket(state, e, key)]
    while place != NONE and stored_of(state)[place].key != key:
        place = stored_of(state)[place].chain
    return int(place)


@compiled_part
def keep_block(state: State, e: int, key: int) -> None:
    """Keep a block that the device gives up; one that is kept already counts as used."""
    place = find_stored(state, e, key)
    if place != NONE:
        _use(state, e, place)
        return
    engine, stored = engines_of(state)[_store_of(state, e)], stored_of(state)
    place = engine.first_spare
    engine.first_spare = stored[place].next
    bucket = _bucket(state, e, key)
    stored[place].key = key
    stored[place].chain = stored_buckets_of(state)[bucket]
    stored_buckets_of(state)[bucket] = place
    _put(state, e, place, 0)


@compiled_part
def load_block(state: State, e: int, place: int) -> int:
    """Read a block that is kept; return when it is on the device."""
    kept = stored_of(state)[place]
    _use(state, e, place)
    return _read(state, e, kept.tier, 1, max(state.now_ns, kept.written_ns))


@compiled_part
def can_swap_out(state: State, e: int, num_blocks: int) -> bool:
    """Whether the first tier has room for a request, if need be of kept blocks."""
    if not state.is_swapping:
        return False
    tier = tiers_of(state)[e, 0]
    return bool(tier.num_swapped + num_blocks <= tier.capacity)


@compiled_part
def swap_out(state: State, e: int, num_blocks: int) -> None:
    """Write the blocks of a request to the first tier."""
    tier = tiers_of(state)[e, 0]
    tier.num_swapped += num_blocks
    _write(state, e, 0, num_blocks)
    while tier.num_kept > 0 and tier.num_kept + tier.num_swapped > tier.capacity:
        place = tier.first_kept
        _unlink(state, e, place)
        _put(state, e, place, 1)


@compiled_part
def swap_in(state: State, e: int, num_blocks: int) -> int:
    """Read them back; return when they are there."""
    tier = tiers_of(state)[e, 0]
    tier.num_swapped -= num_blocks
    return _read(state, e, 0, num_blocks, max(state.now_ns, tier.write_free_ns))


@compiled_part
def _read(state: State, e: int, level: int, num_blocks: int, now_ns: int) -> int:
    tier = tiers_of(state)[e, level]
    tier.read_free_ns = max(tier.read_free_ns, now_ns) + num_blocks * tier.read_ns
    return int(tier.read_free_ns)


@compiled_part
def _write(state: State, e: int, level: int, num_blocks: int) -> int:
    tier = tiers_of(state)[e, level]
    tier.write_free_ns = max(tier.write_free_ns, state.now_ns) + num_blocks * tier.write_ns
    return int(tier.write_free_ns)


@compiled_part
def _put(state: State, e: int, place: int, level: int) -> None:
    """Keep a block in the first tier from a level on with room; what it displaces goes further."""
    while level < state.num_tiers:
        tier = tiers_of(state)[_store_of(state, e), level]
        if tier.num_swapped < tier.capacity:
            stored_of(state)[place].tier = level
            stored_of(state)[place].written_ns = _write(state, e, level, 1)
            _append(state, e, place)
            if tier.num_kept + tier.num_swapped <= tier.capacity:
                return
            place = tier.first_kept
            _unlink(state, e, place)
        level += 1
    _lose(state, e, place)


@compiled_part
def _lose(state: State, e: int, place: int) -> None:
    """Forget a block that no tier keeps any more."""
    engine = engines_of(state)[_store_of(state, e)]
    stored, buckets = stored_of(state), stored_buckets_of(state)
    bucket = _bucket(state, e, stored[place].key)
    before = buckets[bucket]
    if before == place:
        buckets[bucket] = stored[place].chain
    else:
        while stored[before].chain != place:
            before = stored[before].chain
        stored[before].chain = stored[place].chain
    stored[place].next = engine.first_spare
    engine.first_spare = place


@compiled_part
def _use(state: State, e: int, place: int) -> None:
    """Let a kept block be the last used of its tier."""
    _unlink(state, e, place)
    _append(state, e, place)


@compiled_part
def _append(state: State, e: int, place: int) -> None:
    stored = stored_of(state)
    tier = tiers_of(state)[_store_of(state, e), stored[place].tier]
    stored[place].previous = tier.last_kept
    stored[place].next = NONE
    if tier.num_kept == 0:
        tier.first_kept = place
    else:
        stored[tier.last_kept].next = place
    tier.last_kept = place
    tier.num_kept += 1


@compiled_part
def _unlink(state: State, e: int, place: int) -> None:
    stored = stored_of(state)
    tier = tiers_of(state)[_store_of(state, e), stored[place].tier]
    before, after = stored[place].previous, stored[place].next
    if before == NONE:
        tier.first_kept = after
    else:
        stored[before].next = after
    if after == NONE:
        tier.last_kept = before
    else:
        stored[after].previous = before
    tier.num_kept -= 1


@compiled_part
def _bucket(state: State, e: int, key: int) -> int:
    return int(
        _store_of(state, e) * state.num_stored_buckets + (key & (state.num_stored_buckets - 1))
    )
