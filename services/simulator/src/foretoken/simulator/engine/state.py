"""The arrays of a compiled simulation before it runs."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine import layout
from foretoken.simulator.engine.choice import find_scheduler
from foretoken.simulator.engine.cost import place_tables
from foretoken.simulator.engine.layout import NONE, Ints, Records, State
from foretoken.simulator.serving.compiled_kernels import CompiledKernels
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.speculation import draw_yields
from foretoken.simulator.workload.request_plan import (
    RequestPlan,
    Waits,
    count_opening,
    find_first,
    find_sessions,
    find_waits,
)

# Steps of a slice, and least room for prefills and token runs; a slice reports progress.
_SLICE_STEPS = 50_000
# `admission` and `router` of the state, by the names of the rules.
ADMISSIONS = {
    "chunk": layout.ADMIT_CHUNK,
    "prompt": layout.ADMIT_PROMPT,
    "answer": layout.ADMIT_ANSWER,
    "context": layout.ADMIT_CONTEXT,
    "share": layout.ADMIT_SHARE,
    "peak": layout.ADMIT_PEAK,
}
_ROLES = {
    PoolRole.AGGREGATED: layout.AGGREGATED,
    PoolRole.PREFILL: layout.PREFILL_ONLY,
    PoolRole.DECODE: layout.DECODE_ONLY,
}
ROUTERS = {"round_robin": layout.ROUND_ROBIN, "least_loaded": layout.LEAST_LOADED}


class EngineState(NamedTuple):
    """The record that compiled code works on, and the arrays that it points into."""

    record: Records
    arrays: Mapping[str, Records]


def build_state(plan: RequestPlan, setup: DeploymentSetup, tables: CostTables) -> EngineState:
    """Return the state before the first request arrives."""
    rules = np.zeros(1, dtype=layout.STATE)
    rules["router"] = UnknownPluginError.look_up(setup.router, ROUTERS)
    rules["num_units"] = 1 if setup.is_lock_step else setup.num_engines
    return _build(plan, setup, tables, rules)


def build_pool_state(plan: RequestPlan, setup: PoolSetup, tables: CostTables) -> EngineState:
    """Return the state of a pool before it is given a request."""
    none = np.full(plan.num_requests, NONE, dtype=np.int64)
    plan = replace(plan, follows=none, joins=None, concurrency=0)
    if setup.role is PoolRole.PREFILL:
        plan = replace(plan, num_decode_tokens=np.ones_like(plan.num_decode_tokens))
    rules = np.zeros(1, dtype=layout.STATE)
    rules["role"] = _ROLES[setup.role]
    rules["num_units"] = setup.num_replicas_max
    rules["decode_us_min"] = tables.decode_us.min()
    rules["next_ns"] = layout.NEVER_NS
    state = _build(plan, setup.engines, tables, rules)
    if setup.role is PoolRole.PREFILL and setup.has_retries:
        # One whose answer is lost begins anew, where its own blocks may be.
        requests = state.arrays["requests"]
        requests["num_shared"] = (requests["num_prefill"] + 1) // int(rules["block_size"][0])
    return state


def grow_slots(state: EngineState) -> EngineState:
    """Return the state with twice as many slots for requests that hold blocks, in new arrays."""
    rules, arrays = state.record[0], dict(state.arrays)
    num_engines, num_old = arrays["slots"].shape
    first_row = len(arrays["slot_blocks"])
    rows = np.arange(first_row, 2 * first_row, dtype=np.int32).reshape(num_engines, num_old)
    slots = np.zeros((num_engines, 2 * num_old), dtype=np.int32)
    for engine, count in enumerate(arrays["engines"]["num_slots"].tolist()):
        slots[engine, :count] = arrays["slots"][engine, :count]
        slots[engine, count : count + num_old] = rows[engine]
    arrays["engines"]["num_slots"] += num_old
    arrays["slots"] = slots
    arrays["slot_blocks"] = np.concatenate([arrays["slot_blocks"], arrays["slot_blocks"]])
    rules["num_slots"] = 2 * num_old
    for name in ("slots", "slot_blocks"):
        state.record[f"{name}_at"] = arrays[name].ctypes.data
    return EngineState(state.record, arrays)


def _build(
    plan: RequestPlan, setup: DeploymentSetup, tables: CostTables, record: Records
) -> EngineState:
    rules = record[0]
    _set_rules(rules, setup, len(tables.tokens_us))
    _set_sizes(rules, plan, setup)
    requests = _build_requests(plan, rules)
    waits = find_waits(plan.follows, plan.joins)
    _count_waits(waits, requests)
    draft = setup.speculation.draft if setup.speculation else None
    places, columns = place_tables((tables, draft or tables))
    arrays = {
        "tables": places,
        **{f"table {place}": column for place, column in enumerate(columns)},
        "requests": requests,
        "followers": waits.after.astype(np.int32),
        "session_left": np.bincount(requests["session"], minlength=len(requests)).astype(np.int32),
        "ready_order": _order_arrivals(plan, rules, requests),
        "hashes": np.ascontiguousarray(plan.hashes, dtype=np.int64),
        "heap": np.zeros(plan.num_requests, dtype=np.int32),
        "ended": np.zeros(plan.num_requests, dtype=np.int32),
        **_build_engines(rules),
        **_build_kernels(rules, setup.kernels),
        **_build_cache(rules),
        **_build_tiers(rules, setup),
        **_build_yields(plan, rules, setup, requests),
        **_build_output(rules),
    }
    for name in layout.ARRAYS:
        record[f"{name}_at"] = arrays[name].ctypes.data
    return EngineState(record, arrays)


def _set_rules(rules: State, setup: DeploymentSetup, num_stages: int) -> None:
    profile = setup.profile
    for name in layout.PROFILE_RULES:
        rules[name] = getattr(profile, name)
    rules["select_at"] = find_scheduler(profile.scheduler).address
    rules["is_async"] = profile.has_async_scheduling
    rules["has_priorities"] = profile.has_priority_scheduling
    rules["is_caching"] = profile.has_prefix_caching
    rules["admission"] = ADMISSIONS[profile.admission]
    rules["max_num_tokens"] = profile.max_num_batched_tokens
    if profile.batch_wait_iters > 0:
        wait_tokens = profile.batch_wait_tokens_ratio * profile.max_num_batched_tokens
        rules["batch_wait_tokens"] = ceil(wait_tokens)
    rules["num_blocks"] = setup.num_kv_blocks
    rules["watermark_blocks"] = int(profile.watermark_ratio * setup.num_kv_blocks)
    if setup.kernels is not None:
        rules["compile_us"] = setup.kernels.us
        rules["num_kernels"] = len(setup.kernels.ready)
        rules["num_own_kernels"], rules["num_own_lengths"] = setup.kernels.own.shape
        rules["num_group_kernels"], rules["num_group_lengths"] = setup.kernels.group.shape
    rules["max_context"] = setup.max_context
    rules["num_stages"] = num_stages
    rules["depth"] = num_stages if num_stages > 1 else 1 + profile.has_async_scheduling
    rules["num_buckets"] = 1 << max(setup.num_kv_blocks, 1).bit_length()
    rules["is_swapping"] = profile.preemption == "swap" and bool(setup.kv_tiers)
    if rules["is_swapping"] or profile.has_prefix_caching:
        rules["num_tiers"] = len(setup.kv_tiers)
    rules["is_store_shared"] = any(each.is_shared for each in setup.kv_tiers)
    rules["num_stores"] = 1 if rules["is_store_shared"] else setup.num_engines
    if setup.speculation is not None and rules["role"] != layout.PREFILL_ONLY:
        rules["num_draft_tokens"] = setup.speculation.num_draft_tokens
        rules["num_lookahead_tokens"] = setup.speculation.num_lookahead_tokens
    if setup.speculation is not None and setup.speculation.draft is not None:
        rules["num_draft_passes"] = setup.speculation.num_draft_tokens


def _set_sizes(rules: State, plan: RequestPlan, setup: DeploymentSetup) -> None:
    rules["num_requests"] = plan.num_requests
    rules["num_waits"] = len(find_waits(plan.follows, plan.joins).after)
    rules["num_unfollowing"] = np.count_nonzero(find_first(plan.follows, plan.joins))
    rules["is_closed_loop"] = plan.concurrency > 0
    # What an engine finds in a store depends on what others have written by then.
    waits = plan.concurrency > 0 or rules["num_unfollowing"] < plan.num_requests
    rules["is_dynamic"] = waits or rules["is_store_shared"]
    rules["hash_block_tokens"] = plan.hash_block_tokens
    rules["num_hashes"] = len(plan.hashes)
    rules["num_engines"] = setup.num_engines
    num_tokens = plan.num_prefill_tokens + plan.num_decode_tokens
    longest = int(num_tokens.max(initial=1))
    longest += int(rules["num_draft_tokens"] + rules["num_lookahead_tokens"])
    num_blocks, size = int(rules["num_blocks"]), int(rules["block_size"])
    rules["num_slots"] = rules["max_num_seqs"]
    rules["num_slot_blocks"] = min(longest // size + 1, num_blocks) + 1
    rules["num_growth"] = max(int(rules["max_num_seqs"]), size)
    if rules["num_tiers"] and rules["is_caching"]:
        # No more than all tiers hold, nor than there is, and one on its way.
        room = sum(each.capacity_bytes for each in setup.kv_tiers) // _block_bytes(setup)
        rules["num_stored"] = 1 + min(room, int((num_tokens // size).sum()))
        rules["num_stored_buckets"] = 1 << int(rules["num_stored"]).bit_length()
    room = max(_SLICE_STEPS, 4 * setup.num_engines * int(rules["max_num_seqs"]))
    rules["room_steps"] = _SLICE_STEPS + setup.num_engines
    rules["room_prefills"] = rules["room_runs"] = room


def _build_engines(rules: State) -> dict[str, Records]:
    num_engines, num_units = int(rules["num_engines"]), int(rules["num_units"])
    engines = np.zeros(num_engines, dtype=layout.ENGINE)
    for name in ("first_waiting", "last_waiting", "first_arrived", "last_arrived"):
        engines[name] = NONE
    engines["unit"] = np.arange(num_engines) * num_units // num_engines
    engines["num_free"] = rules["num_blocks"]
    engines["num_slots"] = rules["max_num_seqs"]
    store = np.minimum(np.arange(num_engines), int(rules["num_stores"]) - 1)
    engines["first_spare"] = store * int(rules["num_stored"])
    units = np.zeros(num_units, dtype=layout.UNIT)
    units["next_ns"] = layout.NEVER_NS
    units["num_engines"] = num_engines // num_units
    units["first_engine"] = np.arange(num_units) * (num_engines // num_units)
    num_seqs, depth = int(rules["max_num_seqs"]), int(rules["depth"])
    return {
        "engines": engines,
        "units": units,
        "stage_free": np.zeros((num_units, int(rules["num_stages"])), dtype=np.int64),
        "running": np.zeros((num_engines, num_seqs), dtype=np.int32),
        "flights": np.zeros((num_engines, depth), dtype=layout.STEP),
        "rows": np.zeros((num_engines, depth, num_seqs), dtype=np.int32),
        "row_tokens": np.zeros((num_engines, depth, num_seqs), dtype=np.int32),
        "growth": np.zeros((5, int(rules["num_growth"])), dtype=np.int32),
    }


def _build_kernels(rules: State, kernels: CompiledKernels | None) -> dict[str, Records]:
    """Return which kernels numbers of tokens need, and which each engine has."""
    num_engines = int(rules["num_engines"])
    if kernels is None:
        none = np.zeros((0, 0), dtype=np.int32)
        compiled = np.zeros((num_engines, 0), dtype=np.int8)
        return {"own_kernels": none, "group_kernels": none, "compiled": compiled}
    return {
        "own_kernels": kernels.own.astype(np.int32),
        "group_kernels": kernels.group.astype(np.int32),
        "compiled": np.repeat(kernels.ready[None].astype(np.int8), num_engines, axis=0),
    }


def _build_cache(rules: State) -> dict[str, Records]:
    """Return the blocks of every engine, all free, in a ring with one that stands for its ends."""
    num_engines = int(rules["num_engines"]) if rules["is_caching"] else 0
    num_seqs, count = int(rules["max_num_seqs"]), int(rules["num_blocks"]) + 1
    first = np.arange(num_engines, dtype=np.int32)[:, None]
    place = np.arange(count, dtype=np.int32)
    blocks = np.zeros(num_engines * count, dtype=layout.BLOCK)
    blocks["next"] = (first * count + np.roll(place, -1)).ravel()
    blocks["previous"] = (first * count + np.roll(place, 1)).ravel()
    blocks["chain"] = NONE
    num_slot_blocks = int(rules["num_slot_blocks"])
    slots = first * num_seqs + np.arange(num_seqs, dtype=np.int32)[None, ::-1]
    return {
        "blocks": blocks,
        "buckets": np.full(num_engines * int(rules["num_buckets"]), NONE, dtype=np.int32),
        "slots": np.ascontiguousarray(slots),
        "slot_blocks": np.empty((num_engines * num_seqs, num_slot_blocks), dtype=np.int32),
        "hits": np.zeros(num_slot_blocks, dtype=np.int32),
    }


def _build_tiers(rules: State, setup: DeploymentSetup) -> dict[str, Records]:
    """Return the tiers of every engine, empty."""
    num_engines, num_tiers = int(rules["num_engines"]), int(rules["num_tiers"])
    tiers = np.zeros((num_engines, num_tiers), dtype=layout.TIER)
    for level, spec in enumerate(setup.kv_tiers[:num_tiers]):
        block_bytes = _block_bytes(setup)
        tiers["capacity"][:, level] = spec.capacity_bytes // block_bytes
        tiers["read_ns"][:, level] = round(block_bytes / spec.read_bytes_per_s * NS_PER_S)
        tiers["write_ns"][:, level] = round(block_bytes / spec.write_bytes_per_s * NS_PER_S)
    tiers["first_kept"] = tiers["last_kept"] = NONE
    num_stores = int(rules["num_stores"])
    stored = np.zeros(num_stores * int(rules["num_stored"]), dtype=layout.STORED)
    stored["next"] = np.arange(1, len(stored) + 1)
    num_buckets = num_stores * int(rules["num_stored_buckets"])
    return {
        "tiers": tiers,
        "stored": stored,
        "stored_buckets": np.full(num_buckets, NONE, dtype=np.int32),
    }


def _block_bytes(setup: DeploymentSetup) -> int:
    return setup.kv_bytes_per_token * setup.profile.block_size


def _build_yields(
    plan: RequestPlan, rules: State, setup: DeploymentSetup, requests: Records
) -> dict[str, Records]:
    """Return what a verification yields from each token of each answer on, if there are drafts."""
    yields = np.zeros(0, dtype=np.int32)
    if setup.speculation is not None and rules["num_draft_tokens"]:
        yields = draw_yields(plan.num_decode_tokens, setup.speculation).astype(np.int32)
        ends = np.cumsum(plan.num_decode_tokens)
        requests["yield_first"] = ends - plan.num_decode_tokens
    rules["num_yields"] = len(yields)
    return {"yields": yields}


def _build_output(rules: State) -> dict[str, Records]:
    num_prefills = int(rules["room_prefills"])
    return {
        "steps": np.zeros(int(rules["room_steps"]), dtype=layout.STEP),
        "prefills": np.zeros(num_prefills, dtype=layout.PREFILL),
        "prefill_tokens": np.zeros(num_prefills, dtype=np.int32),
        "prefill_context": np.zeros(num_prefills, dtype=np.int32),
        "runs": np.zeros((int(rules["room_runs"]), len(layout.RUN_COLUMNS)), dtype=np.int32),
    }


def _build_requests(plan: RequestPlan, rules: State) -> Records:
    requests = np.zeros(plan.num_requests, dtype=layout.REQUEST)
    for name in ("slot", "next", "engine", "queued_ns", "scheduled_ns", "first_token_ns"):
        requests[name] = NONE
    for name in ("finished_ns", "arrival_ns", "run_first", "loaded_ns"):
        requests[name] = NONE
    requests["num_prefill"] = plan.num_prefill_tokens
    requests["num_decode"] = plan.num_decode_tokens
    requests["earliest_ns"] = plan.arrival_ns
    requests["think_ns"] = plan.think_ns
    requests["priority"] = plan.priority
    requests["stream"] = plan.stream
    requests["prefix_stream"] = plan.prefix_stream
    requests["prefix_tokens"] = plan.prefix_tokens
    requests["hash_first"] = plan.hash_offsets[:-1]
    requests["num_hashes"] = np.diff(plan.hash_offsets)
    requests["num_shared"] = _count_shared_blocks(plan, rules)
    requests["session"] = find_sessions(plan.follows, plan.joins)
    return requests


def _count_shared_blocks(plan: RequestPlan, rules: State) -> Ints:
    """Return how many leading blocks of each request may be equal to another's."""
    size = int(rules["block_size"])
    longest = (plan.num_prefill_tokens + plan.num_decode_tokens) // size
    if rules["num_stored"]:
        # What nobody else has takes room of the tiers and time of their links all the same.
        return longest
    shared = plan.prefix_tokens // size
    num_hashes = np.diff(plan.hash_offsets)
    shared = np.maximum(shared, num_hashes * plan.hash_block_tokens // size)
    _, place, counts = np.unique(plan.stream, return_inverse=True, return_counts=True)
    return np.where(counts[place] > 1, longest, np.minimum(shared, longest))


def _count_waits(waits: Waits, requests: Records) -> None:
    counts = np.bincount(waits.before, minlength=len(requests))
    requests["num_followers"] = counts
    requests["first_follower"] = np.cumsum(counts) - counts
    requests["num_awaited"] = np.bincount(waits.after, minlength=len(requests))


def _order_arrivals(plan: RequestPlan, rules: State, requests: Records) -> Ints:
    """Send what arrives by itself and return it in its order, then what waits."""
    free = np.flatnonzero(requests["num_awaited"] == 0)
    num_open = len(free)
    if plan.concurrency > 0:
        free = free[np.argsort(requests["session"][free], kind="stable")]
        num_open = count_opening(requests["session"][free], plan.concurrency)
    open_requests = free[:num_open]
    arrival_ns = np.maximum(requests["earliest_ns"][open_requests], 0)
    if plan.concurrency > 0:
        begin_ns = requests["earliest_ns"][requests["session"][open_requests]]
        think_ns = requests["think_ns"][open_requests]
        arrival_ns = np.maximum(arrival_ns, np.maximum(begin_ns, 0) + think_ns)
    requests["arrival_ns"][open_requests] = requests["ready_ns"][open_requests] = arrival_ns
    rules["num_open"] = rules["num_released"] = num_open
    free[:num_open] = open_requests[np.lexsort((open_requests, arrival_ns))]
    return free.astype(np.int32)
