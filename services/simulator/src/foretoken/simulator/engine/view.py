"""The arrays of a simulation by their address in memory: compiled, or the same in plain Python."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

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
    Records,
    State,
)
from foretoken.simulator.jit import IS_COMPILED, compiled_part


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


# (address) -> pointer, and (pointer, shape, dtype) -> array.
pointer: Any = intrinsic(_to_pointer) if IS_COMPILED else int
array_at: Callable[[Any, Any, Any], Records] = cast("Any", carray) if IS_COMPILED else _interpret


def _getter(name: str, dtype: Any, shape: Callable[[State], Any]) -> Callable[[State], Records]:
    """Return what finds an array of `layout.ARRAYS`, whose shape follows from the state's rules."""
    at, shape_of = f"{name}_at", compiled_part(shape)

    def find(state: State) -> Records:
        return array_at(pointer(state[at]), shape_of(state), dtype)

    return compiled_part(find)


requests_of = _getter("requests", REQUEST, lambda s: s.num_requests)  # in the order of the plan
engines_of = _getter("engines", ENGINE, lambda s: s.num_engines)
# Engines that tick together: all in lock step, or each alone.
units_of = _getter("units", UNIT, lambda s: s.num_units)
# When each stage of each unit is free, in ns.
stage_free_of = _getter("stage_free", np.int64, lambda s: (s.num_units, s.num_stages))
# Kernels that an engine's tokens need, and those of all in lock step, by how many they are.
own_kernels_of = _getter("own_kernels", np.int32, lambda s: (s.num_own_kernels, s.num_own_lengths))
group_kernels_of = _getter(
    "group_kernels", np.int32, lambda s: (s.num_group_kernels, s.num_group_lengths)
)
# Whether each engine has compiled each kernel; those of all stand with the first.
compiled_of = _getter("compiled", np.int8, lambda s: (s.num_engines, s.num_kernels))
# Requests that run on each engine, in order of admission.
running_of = _getter("running", np.int32, lambda s: (s.num_engines, s.max_num_seqs))
# Steps in flight on each engine, a ring.
flights_of = _getter("flights", STEP, lambda s: (s.num_engines, s.depth))
# Requests that get tokens of a step in flight, and how many each gets.
rows_of = _getter("rows", np.int32, lambda s: (s.num_engines, s.depth, s.max_num_seqs))
row_tokens_of = _getter("row_tokens", np.int32, lambda s: (s.num_engines, s.depth, s.max_num_seqs))
# What a verification yields that begins at each token of each answer.
yields_of = _getter("yields", np.int32, lambda s: s.num_yields)
# Blocks of all engines, each with one more for the ends of its free list.
blocks_of = _getter("blocks", BLOCK, lambda s: s.num_engines * (s.num_blocks + 1))
# First block of each bucket of names.
buckets_of = _getter("buckets", np.int32, lambda s: s.num_engines * s.num_buckets)
# Free slots of each engine, a stack.
slots_of = _getter("slots", np.int32, lambda s: (s.num_engines, s.num_slots))
# Blocks of the request in each slot, in order.
slot_blocks_of = _getter(
    "slot_blocks", np.int32, lambda s: (s.num_engines * s.num_slots, s.num_slot_blocks)
)
hits_of = _getter("hits", np.int32, lambda s: s.num_slot_blocks)  # of the last lookup
# The tiers below each engine's device memory, the nearest first.
tiers_of = _getter("tiers", TIER, lambda s: (s.num_engines, s.num_tiers))
# Room for the blocks that the tiers of all stores keep, and the first of each bucket of names.
stored_of = _getter("stored", STORED, lambda s: s.num_stores * s.num_stored)
stored_buckets_of = _getter(
    "stored_buckets", np.int32, lambda s: s.num_stores * s.num_stored_buckets
)
# Room for planning which requests take blocks when.
growth_of = _getter("growth", np.int32, lambda s: (5, s.num_growth))
# Names of the blocks of prompts, as the plan gives them.
hashes_of = _getter("hashes", np.int64, lambda s: s.num_hashes)
# The requests that wait for each, one after the other.
followers_of = _getter("followers", np.int32, lambda s: s.num_waits)
# How many requests of each session are not complete; it has its first one's number.
session_left_of = _getter("session_left", np.int32, lambda s: s.num_requests)
# Requests that follow none, in the order they are ready.
ready_order_of = _getter("ready_order", np.int32, lambda s: s.num_unfollowing)
# Requests that others let arrive, the next one first.
heap_of = _getter("heap", np.int32, lambda s: s.num_requests)
# Requests that a pool is done with since it was last asked.
ended_of = _getter("ended", np.int32, lambda s: s.num_requests)
# Output: the steps that are over; the pieces of prompts, their tokens and the tokens before them;
# runs of tokens, each as `RUN_COLUMNS` says.
steps_of = _getter("steps", STEP, lambda s: s.room_steps)
prefills_of = _getter("prefills", PREFILL, lambda s: s.room_prefills)
prefill_tokens_of = _getter("prefill_tokens", np.int32, lambda s: s.room_prefills)
prefill_context_of = _getter("prefill_context", np.int32, lambda s: s.room_prefills)
runs_of = _getter("runs", np.int32, lambda s: (s.room_runs, len(RUN_COLUMNS)))
