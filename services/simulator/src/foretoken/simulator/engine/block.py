"""The KV cache of an engine: blocks by number, free ones by last use, full ones by content.

As long as none has a name blocks are all alike and only counted.
"""

import numpy as np

from foretoken.simulator.engine.layout import NONE, State, as_int64
from foretoken.simulator.engine.tier import find_stored, keep_block, load_block
from foretoken.simulator.engine.view import (
    blocks_of,
    buckets_of,
    engines_of,
    hashes_of,
    hits_of,
    requests_of,
    slot_blocks_of,
    slots_of,
)
from foretoken.simulator.jit import compiled_part


@compiled_part
def num_blocks_of(state: State, num_tokens: int) -> int:
    """Return how many blocks hold that many tokens."""
    return int((num_tokens + state.block_size - 1) // state.block_size)


@compiled_part
def allocate(state: State, e: int, r: int, num_tokens: int) -> bool:
    """Give a request blocks for that many tokens in all, or nothing and False."""
    engine, request = engines_of(state)[e], requests_of(state)[r]
    num_missing = num_blocks_of(state, num_tokens) - request.num_blocks
    if num_missing <= 0:
        return True
    if num_missing > engine.num_free:
        return False
    take_blocks(state, e, r, num_missing)
    return True


@compiled_part
def take_blocks(state: State, e: int, r: int, count: int) -> None:
    """Give a request that many free blocks, which are there."""
    engine, request = engines_of(state)[e], requests_of(state)[r]
    if engine.is_listed:
        end = (e + 1) * (state.num_blocks + 1) - 1
        blocks, row = blocks_of(state), slot_blocks_of(state)[request.slot]
        for _ in range(count):
            b = blocks[end].next
            _unlink(state, b)
            if blocks[b].key != 0:
                _forget(state, e, b)
            blocks[b].num_users = 1
            row[request.num_blocks] = b
            request.num_blocks += 1
    else:
        request.num_blocks += count
    engine.num_free -= count


@compiled_part
def free_blocks(state: State, e: int, r: int) -> None:
    """Take back all blocks of a request; with its last they are found again longest."""
    engine, request = engines_of(state)[e], requests_of(state)[r]
    if engine.is_listed:
        if request.slot == NONE:
            return
        end = (e + 1) * (state.num_blocks + 1) - 1
        blocks, row = blocks_of(state), slot_blocks_of(state)[request.slot]
        for index in range(request.num_blocks - 1, -1, -1):
            b = row[index]
            blocks[b].num_users -= 1
            if blocks[b].num_users == 0:
                _append(state, end, b)
                engine.num_free += 1
    else:
        engine.num_free += request.num_blocks
    if state.is_caching and request.slot != NONE:
        _release_slot(state, e, r)
    request.num_blocks = 0


@compiled_part
def find_prefix(state: State, e: int, r: int) -> int:
    """Return how many leading blocks of a request without blocks need not be computed.

    They are on the device and, from some place on, in the tiers below. Never all of its tokens: the
    last one is to compute. The blocks are noted in `hits`.
    """
    request = requests_of(state)[r]
    state.num_idle_hits = state.num_stored_hits = 0
    state.chain_key = state.device_key = 0
    if not state.is_caching or request.is_swapped:
        return 0
    if request.num_shared == 0 and request.num_preemptions == 0:
        return 0
    num_most = (request.num_prefill + request.num_generated - 1) // state.block_size
    for index in range(num_most):
        key = _name(state, r, index, state.chain_key)
        b = NONE if state.num_stored_hits > 0 else _find(state, e, key)
        if b != NONE:
            state.device_key = key
            if blocks_of(state)[b].num_users == 0:
                state.num_idle_hits += 1
        else:
            b = find_stored(state, e, key)
            if b == NONE:
                return index
            state.num_stored_hits += 1
        state.chain_key = key
        hits_of(state)[index] = b
    return int(num_most)


@compiled_part
def take_hits(state: State, e: int, r: int, num_hits: int) -> None:
    """Give a request a slot and the blocks that were just found for it, or will be loaded."""
    if not state.is_caching:
        return
    take_slot(state, e, r)
    engine, request = engines_of(state)[e], requests_of(state)[r]
    row = slot_blocks_of(state)[request.slot]
    num_stored = state.num_stored_hits
    for index in range(num_hits - num_stored):
        b = hits_of(state)[index]
        if blocks_of(state)[b].num_users == 0:
            _unlink(state, b)
            engine.num_free -= 1
        blocks_of(state)[b].num_users += 1
        row[index] = b
    request.num_blocks = request.num_named = num_hits - num_stored
    request.chain_key = state.device_key
    request.num_computed = num_hits * state.block_size
    request.num_cached += request.num_computed
    if num_stored > 0:
        request.num_loaded += num_stored * state.block_size
        for index in range(num_hits - num_stored, num_hits):
            loaded_ns = load_block(state, e, hits_of(state)[index])
            request.loaded_ns = max(request.loaded_ns, loaded_ns)
        take_blocks(state, e, r, num_stored)
        name_blocks(state, e, r, num_hits)


@compiled_part
def take_slot(state: State, e: int, r: int) -> None:
    """Give a request a free slot, where its blocks are listed."""
    if state.is_caching:
        engine = engines_of(state)[e]
        engine.num_slots -= 1
        requests_of(state)[r].slot = slots_of(state)[e, engine.num_slots]


@compiled_part
def name_blocks(state: State, e: int, r: int, num_full: int) -> None:
    """Let the leading full blocks of a request be found by their content."""
    request = requests_of(state)[r]
    if request.num_named < num_full and not engines_of(state)[e].is_listed:
        _list_blocks(state, e)
    while request.num_named < num_full:
        index = as_int64(request.num_named)
        key = _name(state, r, index, request.chain_key)
        b = slot_blocks_of(state)[request.slot, index]
        if blocks_of(state)[b].key == 0:
            _remember(state, e, b, key)
            if state.is_store_shared and find_stored(state, e, key) == NONE:
                keep_block(state, e, key)
        request.chain_key = key
        request.num_named += 1


@compiled_part
def _list_blocks(state: State, e: int) -> None:
    """Give the requests of an engine, whose blocks were counted, blocks by number."""
    engine = engines_of(state)[e]
    engine.is_listed = 1
    for r in range(state.num_requests):
        request = requests_of(state)[r]
        if request.engine == e and request.slot != NONE:
            count = as_int64(request.num_blocks)
            request.num_blocks = 0
            engine.num_free += count
            take_blocks(state, e, r, count)


@compiled_part
def _name(state: State, r: int, index: int, chain_key: int) -> int:
    """Return the name of a block's content, given that of all before it; never 0."""
    request, size = requests_of(state)[r], state.block_size
    first, last = index * size, index * size + size - 1
    per_hash = max(state.hash_block_tokens, 1)
    if request.num_hashes > last // per_hash:
        key = _mix(chain_key, as_int64(1))
        for place in range(first // per_hash, last // per_hash + 1):
            key = _mix(key, hashes_of(state)[request.hash_first + place])
    elif last < request.prefix_tokens:
        key = _mix(_mix(chain_key, as_int64(2)), request.prefix_stream)
    else:
        key = _mix(_mix(chain_key, as_int64(3)), request.stream)
    return key if key != 0 else 1


@compiled_part
def _mix(key: int, value: int) -> int:
    """Return a number that hardly another pair has. Source: the finalizer of SplitMix64."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(value)
    mixed = mixed + np.uint64(0x632BE59BD9B4E019)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64(mixed ^ (mixed >> np.uint64(31)))  # type: ignore[return-value]


@compiled_part
def _bucket(state: State, e: int, key: int) -> int:
    return int(e * state.num_buckets + (key & (state.num_buckets - 1)))


@compiled_part
def _find(state: State, e: int, key: int) -> int:
    b = buckets_of(state)[_bucket(state, e, key)]
    while b != NONE and blocks_of(state)[b].key != key:
        b = blocks_of(state)[b].chain
    return int(b)


@compiled_part
def _remember(state: State, e: int, b: int, key: int) -> None:
    """Add a block to its bucket, behind those of the same content."""
    blocks, place = blocks_of(state), _bucket(state, e, key)
    blocks[b].key = key
    blocks[b].chain = NONE
    last = buckets_of(state)[place]
    if last == NONE:
        buckets_of(state)[place] = b
        return
    while blocks[last].chain != NONE:
        last = blocks[last].chain
    blocks[last].chain = b


@compiled_part
def _forget(state: State, e: int, b: int) -> None:
    """Give up the content of a block; the last of that content goes to the tiers below.

    A store that is shared had it since it was named.
    """
    key = blocks_of(state)[b].key
    _leave_bucket(state, e, b)
    is_lost = state.num_stored > 0 and not state.is_store_shared
    if is_lost and _find(state, e, key) == NONE:
        keep_block(state, e, key)


@compiled_part
def _leave_bucket(state: State, e: int, b: int) -> None:
    blocks, place = blocks_of(state), _bucket(state, e, blocks_of(state)[b].key)
    blocks[b].key = 0
    before = buckets_of(state)[place]
    if before == b:
        buckets_of(state)[place] = blocks[b].chain
        return
    while blocks[before].chain != b:
        before = blocks[before].chain
    blocks[before].chain = blocks[b].chain


@compiled_part
def _unlink(state: State, b: int) -> None:
    blocks = blocks_of(state)
    before, after = blocks[b].previous, blocks[b].next
    blocks[before].next = after
    blocks[after].previous = before


@compiled_part
def _append(state: State, end: int, b: int) -> None:
    """Put a block last among the free ones."""
    blocks = blocks_of(state)
    before = blocks[end].previous
    blocks[before].next = b
    blocks[b].previous = before
    blocks[b].next = end
    blocks[end].previous = b


@compiled_part
def _release_slot(state: State, e: int, r: int) -> None:
    engine, request = engines_of(state)[e], requests_of(state)[r]
    slots_of(state)[e, engine.num_slots] = request.slot
    engine.num_slots += 1
    request.slot = NONE
    request.num_named = 0
    request.chain_key = 0
