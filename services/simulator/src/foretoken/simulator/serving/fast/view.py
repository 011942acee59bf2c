"""The arrays of a compiled simulation, found by where they lie in memory."""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from foretoken.simulator.jit import IS_COMPILED, compiled_part
from foretoken.simulator.serving.fast.layout import (
    BLOCK,
    ENGINE,
    PREFILL,
    REQUEST,
    RUN_COLUMNS,
    STEP,
    UNIT,
    Ints,
    Records,
    State,
)


def _to_pointer(_typing: Any, address: Any) -> Any:
    """Take a number for an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@lru_cache(maxsize=1024)
def _interpret(address: int, shape: int | tuple[int, ...], dtype: Any) -> Records:
    """Return the memory at an address as an array, for plain Python."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


_pointer: Any = intrinsic(_to_pointer) if IS_COMPILED else int
_array: Any = carray if IS_COMPILED else _interpret


@compiled_part
def requests_of(state: State) -> Records:
    """Return the requests, in the order of the plan."""
    return _array(_pointer(state.requests_at), state.num_requests, REQUEST)


@compiled_part
def engines_of(state: State) -> Records:
    """Return the engines."""
    return _array(_pointer(state.engines_at), state.num_engines, ENGINE)


@compiled_part
def units_of(state: State) -> Records:
    """Return engines that turn together: all in lock step, or each alone."""
    return _array(_pointer(state.units_at), state.num_units, UNIT)


@compiled_part
def stage_free_of(state: State) -> Ints:
    """Return when each stage of each unit is free, in ns."""
    return _array(_pointer(state.stage_free_at), (state.num_units, state.num_stages), np.int64)


@compiled_part
def running_of(state: State) -> Ints:
    """Return requests that run on each engine, in order of admission."""
    return _array(_pointer(state.running_at), (state.num_engines, state.max_num_seqs), np.int32)


@compiled_part
def flights_of(state: State) -> Records:
    """Return steps in flight on each engine, a ring."""
    return _array(_pointer(state.flights_at), (state.num_engines, state.depth), STEP)


@compiled_part
def rows_of(state: State) -> Ints:
    """Return requests that get a token of a step in flight."""
    return _array(
        _pointer(state.rows_at), (state.num_engines, state.depth, state.max_num_seqs), np.int32
    )


@compiled_part
def blocks_of(state: State) -> Records:
    """Return blocks of all engines, each with one more for the ends of its free list."""
    return _array(_pointer(state.blocks_at), state.num_engines * (state.num_blocks + 1), BLOCK)


@compiled_part
def buckets_of(state: State) -> Ints:
    """Return first block of each bucket of names."""
    return _array(_pointer(state.buckets_at), state.num_engines * state.num_buckets, np.int32)


@compiled_part
def slots_of(state: State) -> Ints:
    """Return free slots of each engine, a stack."""
    return _array(_pointer(state.slots_at), (state.num_engines, state.num_slots), np.int32)


@compiled_part
def slot_blocks_of(state: State) -> Ints:
    """Return blocks of the request in each slot, in order."""
    return _array(
        _pointer(state.slot_blocks_at),
        (state.num_engines * state.num_slots, state.num_slot_blocks),
        np.int32,
    )


@compiled_part
def hits_of(state: State) -> Ints:
    """Return blocks that the last lookup found."""
    return _array(_pointer(state.hits_at), state.num_slot_blocks, np.int32)


@compiled_part
def growth_of(state: State) -> Ints:
    """Return room for planning which requests take blocks when."""
    return _array(_pointer(state.growth_at), (5, state.num_growth), np.int32)


@compiled_part
def hashes_of(state: State) -> Ints:
    """Return names of the blocks of prompts, as the plan gives them."""
    return _array(_pointer(state.hashes_at), state.num_hashes, np.int64)


@compiled_part
def ready_order_of(state: State) -> Ints:
    """Return requests that follow none, in the order they are ready."""
    return _array(_pointer(state.ready_order_at), state.num_unfollowing, np.int32)


@compiled_part
def heap_of(state: State) -> Ints:
    """Return requests that others let arrive, the next one first."""
    return _array(_pointer(state.heap_at), state.num_requests, np.int32)


@compiled_part
def ended_of(state: State) -> Ints:
    """Return requests that a pool is done with since it was last asked."""
    return _array(_pointer(state.ended_at), state.num_requests, np.int32)


@compiled_part
def steps_of(state: State) -> Records:
    """Return output: the steps that are over."""
    return _array(_pointer(state.steps_at), state.room_steps, STEP)


@compiled_part
def prefills_of(state: State) -> Records:
    """Return output: the pieces of prompts."""
    return _array(_pointer(state.prefills_at), state.room_prefills, PREFILL)


@compiled_part
def prefill_tokens_of(state: State) -> Ints:
    """Return output: the tokens of each of these pieces."""
    return _array(_pointer(state.prefill_tokens_at), state.room_prefills, np.int32)


@compiled_part
def prefill_context_of(state: State) -> Ints:
    """Return output: the tokens before each of these pieces."""
    return _array(_pointer(state.prefill_context_at), state.room_prefills, np.int32)


@compiled_part
def runs_of(state: State) -> Ints:
    """Return output: runs of tokens, each as `RUN_COLUMNS` says."""
    return _array(_pointer(state.runs_at), (state.room_runs, len(RUN_COLUMNS)), np.int32)
