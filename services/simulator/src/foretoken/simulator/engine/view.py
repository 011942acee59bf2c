"""The arrays of a compiled simulation, found by where they lie in memory."""

import numpy as np

from foretoken.simulator.engine.layout import (
    BLOCK,
    ENGINE,
    PREFILL,
    REQUEST,
    RUN_COLUMNS,
    STEP,
    STORED,
    TIER,
    UNIT,
    Ints,
    Records,
    State,
)
from foretoken.simulator.engine.memory import array_at, pointer
from foretoken.simulator.jit import compiled_part


@compiled_part
def requests_of(state: State) -> Records:
    """Return the requests, in the order of the plan."""
    return array_at(pointer(state.requests_at), state.num_requests, REQUEST)


@compiled_part
def engines_of(state: State) -> Records:
    """Return the engines."""
    return array_at(pointer(state.engines_at), state.num_engines, ENGINE)


@compiled_part
def units_of(state: State) -> Records:
    """Return engines that tick together: all in lock step, or each alone."""
    return array_at(pointer(state.units_at), state.num_units, UNIT)


@compiled_part
def stage_free_of(state: State) -> Ints:
    """Return when each stage of each unit is free, in ns."""
    return array_at(pointer(state.stage_free_at), (state.num_units, state.num_stages), np.int64)


@compiled_part
def running_of(state: State) -> Ints:
    """Return requests that run on each engine, in order of admission."""
    return array_at(pointer(state.running_at), (state.num_engines, state.max_num_seqs), np.int32)


@compiled_part
def flights_of(state: State) -> Records:
    """Return steps in flight on each engine, a ring."""
    return array_at(pointer(state.flights_at), (state.num_engines, state.depth), STEP)


@compiled_part
def rows_of(state: State) -> Ints:
    """Return requests that get a token of a step in flight."""
    return array_at(
        pointer(state.rows_at), (state.num_engines, state.depth, state.max_num_seqs), np.int32
    )


@compiled_part
def row_tokens_of(state: State) -> Ints:
    """Return how many tokens each of these gets."""
    return array_at(
        pointer(state.row_tokens_at),
        (state.num_engines, state.depth, state.max_num_seqs),
        np.int32,
    )


@compiled_part
def yields_of(state: State) -> Ints:
    """Return what a verification yields that begins at each token of each answer."""
    return array_at(pointer(state.yields_at), state.num_yields, np.int32)


@compiled_part
def blocks_of(state: State) -> Records:
    """Return blocks of all engines, each with one more for the ends of its free list."""
    return array_at(pointer(state.blocks_at), state.num_engines * (state.num_blocks + 1), BLOCK)


@compiled_part
def buckets_of(state: State) -> Ints:
    """Return first block of each bucket of names."""
    return array_at(pointer(state.buckets_at), state.num_engines * state.num_buckets, np.int32)


@compiled_part
def slots_of(state: State) -> Ints:
    """Return free slots of each engine, a stack."""
    return array_at(pointer(state.slots_at), (state.num_engines, state.num_slots), np.int32)


@compiled_part
def slot_blocks_of(state: State) -> Ints:
    """Return blocks of the request in each slot, in order."""
    return array_at(
        pointer(state.slot_blocks_at),
        (state.num_engines * state.num_slots, state.num_slot_blocks),
        np.int32,
    )


@compiled_part
def hits_of(state: State) -> Ints:
    """Return blocks that the last lookup found."""
    return array_at(pointer(state.hits_at), state.num_slot_blocks, np.int32)


@compiled_part
def tiers_of(state: State) -> Records:
    """Return the tiers below each engine's device memory, the nearest first."""
    return array_at(pointer(state.tiers_at), (state.num_engines, state.num_tiers), TIER)


@compiled_part
def stored_of(state: State) -> Records:
    """Return room for the blocks that the tiers of all stores keep."""
    return array_at(pointer(state.stored_at), state.num_stores * state.num_stored, STORED)


@compiled_part
def stored_buckets_of(state: State) -> Ints:
    """Return first kept block of each bucket of names."""
    count = state.num_stores * state.num_stored_buckets
    return array_at(pointer(state.stored_buckets_at), count, np.int32)


@compiled_part
def growth_of(state: State) -> Ints:
    """Return room for planning which requests take blocks when."""
    return array_at(pointer(state.growth_at), (5, state.num_growth), np.int32)


@compiled_part
def hashes_of(state: State) -> Ints:
    """Return names of the blocks of prompts, as the plan gives them."""
    return array_at(pointer(state.hashes_at), state.num_hashes, np.int64)


@compiled_part
def followers_of(state: State) -> Ints:
    """Return the requests that wait for each, one after the other."""
    return array_at(pointer(state.followers_at), state.num_waits, np.int32)


@compiled_part
def session_left_of(state: State) -> Ints:
    """Return how many requests of each session are not complete; it has its first one's number."""
    return array_at(pointer(state.session_left_at), state.num_requests, np.int32)


@compiled_part
def ready_order_of(state: State) -> Ints:
    """Return requests that follow none, in the order they are ready."""
    return array_at(pointer(state.ready_order_at), state.num_unfollowing, np.int32)


@compiled_part
def heap_of(state: State) -> Ints:
    """Return requests that others let arrive, the next one first."""
    return array_at(pointer(state.heap_at), state.num_requests, np.int32)


@compiled_part
def ended_of(state: State) -> Ints:
    """Return requests that a pool is done with since it was last asked."""
    return array_at(pointer(state.ended_at), state.num_requests, np.int32)


@compiled_part
def steps_of(state: State) -> Records:
    """Return output: the steps that are over."""
    return array_at(pointer(state.steps_at), state.room_steps, STEP)


@compiled_part
def prefills_of(state: State) -> Records:
    """Return output: the pieces of prompts."""
    return array_at(pointer(state.prefills_at), state.room_prefills, PREFILL)


@compiled_part
def prefill_tokens_of(state: State) -> Ints:
    """Return output: the tokens of each of these pieces."""
    return array_at(pointer(state.prefill_tokens_at), state.room_prefills, np.int32)


@compiled_part
def prefill_context_of(state: State) -> Ints:
    """Return output: the tokens before each of these pieces."""
    return array_at(pointer(state.prefill_context_at), state.room_prefills, np.int32)


@compiled_part
def runs_of(state: State) -> Ints:
    """Return output: runs of tokens, each as `RUN_COLUMNS` says."""
    return array_at(pointer(state.runs_at), (state.room_runs, len(RUN_COLUMNS)), np.int32)
