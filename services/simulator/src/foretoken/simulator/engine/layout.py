"""The arrays that hold the state of a compiled simulation, and the numbers that stand for rules.

A queue is a list through the requests' `next`; the requests that run are a row of `running`, in the
order of admission. Blocks of the KV cache are numbered through all engines; each engine has one
more, the ends of its list of free blocks.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretoken.simulator.cost.tables import CostTables

Records = NDArray[Any]
Ints = NDArray[Any]

# For what takes a number to be compiled just once, not for each width and constant.
as_int64: Any = np.int64

# Later than any instant of a simulation.
NEVER_NS = 2**62
# No request, block or slot.
NONE = -1

# `admission`: what must fit into free blocks before a request is admitted.
ADMIT_CHUNK, ADMIT_PROMPT, ADMIT_ANSWER, ADMIT_CONTEXT, ADMIT_SHARE, ADMIT_PEAK = range(6)
# `router`.
ROUND_ROBIN, LEAST_LOADED = 0, 1
# What the kernel returns: all is done, it wants to be called again, an engine cannot go on, and of
# a pool: requests have ended.
DONE, MORE, STUCK, ENDED = 0, 1, 2, 3
# `role`: a whole deployment with its router, or a pool that requests are given to.
DEPLOYMENT, AGGREGATED, PREFILL_ONLY, DECODE_ONLY = 0, 1, 2, 3
# `unit.tick`: it waits for a request, ticks at `next_ns`, or first completes its oldest batch.
IDLE, TICK, COMPLETE = 0, 1, 2


# The record of everything: rules, counters and where the arrays lie in memory. As one record the
# compiled functions hand on an address; as arrays in a tuple they would hand on each of its parts.
State: TypeAlias = Any

# Fields of `EngineProfile` that are fields of the state too.
PROFILE_RULES = (
    "block_size",
    "max_num_seqs",
    "max_chunk_tokens",
    "max_num_prefills",
    "max_decode_run",
    "mixes_prefill",
    "counts_padding",
    "batch_wait_iters",
    "deals_requests",
    "balance_timeout_iters",
    "balance_wait_iters",
    "prefill_interval",
    "receive_interval",
    "host_us",
    "host_us_per_seq",
    "admission_us_per_token",
    "output_us",
    "output_us_per_seq",
    "output_us_per_past_token",
    "frontend_ms",
    "frontend_us_per_token",
    "executor_us_per_token",
)
_RULES = (
    "select_at",  # where the scheduler's code is
    "role",
    "has_priorities",
    "router",
    "is_async",
    "is_caching",
    "admission",
    "block_size",
    "num_blocks",
    "watermark_blocks",
    "max_num_seqs",
    "max_num_tokens",
    "max_chunk_tokens",
    "max_num_prefills",
    "max_decode_run",
    "mixes_prefill",
    "counts_padding",
    "batch_wait_iters",
    "batch_wait_tokens",  # of a batch from which on prompts wait no longer (0: they do not)
    "deals_requests",
    "balance_timeout_iters",
    "balance_wait_iters",
    "prefill_interval",
    "receive_interval",
    "max_context",
    "depth",
    "num_stages",
    "num_kernels",  # that are compiled when they are first needed (0: none)
    "num_own_kernels",  # that a number of an engine's tokens needs
    "num_group_kernels",  # that a number of all tokens in lock step needs
    "num_own_lengths",  # numbers of tokens of which that is known, from 0 on
    "num_group_lengths",
    "num_buckets",
    "hash_block_tokens",
    "is_closed_loop",
    "is_dynamic",
    "num_requests",
    "num_engines",
    "num_units",
    "num_waits",  # pairs of a request and one that it waits for
    "num_unfollowing",  # requests that wait for none
    "num_open",  # of them, those that arrive by themselves
    "num_slots",  # of an engine
    "num_slot_blocks",
    "num_growth",
    "num_hashes",
    "num_draft_tokens",  # proposed for a request in every step
    "num_lookahead_tokens",  # KV slots beyond those that are verified
    "num_draft_passes",  # of the draft in a step that take time
    "num_yields",
    "num_tiers",
    "is_swapping",  # the preempted to the first tier
    "num_stores",  # engines with tiers of their own, or one store of all
    "is_store_shared",
    "num_stored",  # blocks that the tiers of a store have room for
    "num_stored_buckets",
    "room_steps",
    "room_prefills",
    "room_runs",
)
_TIMES = (
    "host_us",
    "host_us_per_seq",
    "admission_us_per_token",
    "output_us",
    "output_us_per_seq",
    "output_us_per_past_token",
    "frontend_ms",
    "frontend_us_per_token",
    "executor_us_per_token",
    "compile_us",
    "decode_us_min",  # of the attention of a step that only decodes
)
_COUNTERS = (
    "now_ns",
    "num_done",
    "num_ready",  # of those that arrive by themselves, gone to engines
    "num_released",  # of those that follow none, not held back by a closed loop
    "num_heap",
    "round_robin",
    "chain_key",  # of the last lookup
    "device_key",  # of its blocks on the device
    "num_idle_hits",  # blocks of the last lookup that nobody uses
    "num_stored_hits",  # blocks of the last lookup that a tier keeps
    "num_out_steps",
    "num_out_prefills",
    "num_out_runs",
    # Of a pool: its next instant, requests that ended in the last call, and when.
    "next_ns",
    "num_ended",
    "ended_ns",
)
# Arrays, each the name of the getter below without `_of`.
ARRAYS = (
    "requests",
    "engines",
    "units",
    "stage_free",
    "own_kernels",
    "group_kernels",
    "compiled",
    "running",
    "flights",
    "rows",
    "row_tokens",
    "yields",
    "tables",
    "tiers",
    "stored",
    "stored_buckets",
    "blocks",
    "buckets",
    "slots",
    "slot_blocks",
    "hits",
    "growth",
    "hashes",
    "followers",
    "session_left",
    "ready_order",
    "heap",
    "ended",
    "steps",
    "prefills",
    "prefill_tokens",
    "prefill_context",
    "runs",
)


# numpy has record types of one's own, and `np.record` is one; its stubs have not.
class Record(np.void):  # type: ignore[misc]
    """A record whose fields plain Python reads as attributes, as compiled code does."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """Return a field."""
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field."""
        self[name] = value


def _record(fields: Sequence[tuple[Any, ...]]) -> Any:
    """Return the type of records with such fields."""
    return np.dtype((Record, np.dtype(list(fields), align=True)))


STATE = _record(
    [
        *((name, np.int64) for name in (*_RULES, *_COUNTERS)),
        *((name, np.float64) for name in _TIMES),
        *((f"{name}_at", np.int64) for name in ARRAYS),
    ]
)

REQUEST = _record(
    [
        # What a step touches, in one cache line.
        ("num_prefill", np.int32),
        ("num_decode", np.int32),
        ("num_computed", np.int32),
        ("num_generated", np.int32),  # output tokens scheduled
        ("num_emitted", np.int32),  # output tokens that have left
        ("num_blocks", np.int32),
        ("num_named", np.int32),  # leading blocks that have a name
        ("num_shared", np.int32),  # leading blocks whose content another request may have
        ("run_first", np.int32),
        ("run_last", np.int32),
        ("run_count", np.int32),
        ("slot", np.int32),
        ("next", np.int32),
        ("engine", np.int32),
        ("run_stride", np.int32),
        ("num_preemptions", np.int32),
        ("chain_key", np.int64),
        ("num_cached", np.int64),
        ("earliest_ns", np.int64),
        ("arrival_ns", np.int64),
        ("ready_ns", np.int64),
        ("queued_ns", np.int64),
        ("scheduled_ns", np.int64),
        ("first_token_ns", np.int64),
        ("finished_ns", np.int64),
        ("think_ns", np.int64),
        ("stream", np.int64),
        ("prefix_stream", np.int64),
        ("prefix_tokens", np.int64),
        ("hash_first", np.int64),
        ("num_hashes", np.int32),
        ("first_follower", np.int32),  # in `followers`
        ("num_followers", np.int32),
        ("num_awaited", np.int32),  # not complete yet, of those that it waits for
        ("session", np.int32),
        ("priority", np.int32),
        ("outcome", np.int32),
        ("attempt", np.int32),  # how often a pool has begun it
        ("num_draft", np.int32),  # proposed tokens that its next step verifies
        ("is_swapped", np.int32),  # its blocks are in the first tier
        ("num_loaded", np.int64),
        ("loaded_ns", np.int64),  # may not run before
        ("yield_first", np.int64),  # of its answer in `yields`
        ("is_on_engine", np.int32),  # given to a pool and not ended
        ("is_at_front_end", np.int32),  # or through it
    ]
)

ENGINE = _record(
    [
        ("unit", np.int32),
        ("num_running", np.int32),
        ("num_waiting", np.int32),
        ("first_waiting", np.int32),
        ("last_waiting", np.int32),
        ("is_ranked", np.int32),  # what waits is in order of priority, where that counts
        ("num_arrived", np.int32),  # since the last tick
        ("first_arrived", np.int32),
        ("last_arrived", np.int32),
        (
            "num_transferred_in",
            np.int32,
        ),  # computed elsewhere and with their blocks here, not yet running
        ("first_transferred_in", np.int32),
        ("last_transferred_in", np.int32),
        ("num_free", np.int32),  # blocks
        ("is_listed", np.int32),  # its blocks are listed one by one, for some have or had names
        ("num_slots", np.int32),  # free ones
        ("first_spare", np.int32),  # place for a kept block
        ("num_steps", np.int32),
        # The batch that is being chosen.
        ("flight", np.int32),
        ("num_tokens", np.int32),
        ("num_rows", np.int32),  # tokens that are sampled from
        ("num_yielding", np.int32),  # requests that get tokens
        ("num_output_tokens", np.int32),
        ("num_admitted_tokens", np.int64),  # of the requests that join it
        ("num_decodes", np.int32),
        ("num_prefills", np.int32),
        ("num_preempted", np.int32),
        ("first_prefill", np.int32),
        ("kv_tokens", np.int64),
        ("kv_tokens_max", np.int64),
        # Of prompts that wait or have arrived.
        ("num_waiting_tokens", np.int64),
        # For how many more steps it may be repeated as it is, if nothing arrives.
        ("num_repeats", np.int64),
        ("holds_prompts", np.int32),  # out of the batch that is being chosen
        ("is_crowded", np.int32),  # some were left over by the last batch that held none back
        # The scheduler's own.
        ("scratch", np.int64, (4,)),
        ("scratch_ratio", np.float64),
    ]
)

UNIT = _record(
    [
        ("next_ns", np.int64),
        ("host_free_ns", np.int64),
        ("output_free_ns", np.int64),  # when the output server has handed out all it has
        # When the server in front of it has tokenized, and handed over, all it has.
        ("tokenizer_free_ns", np.int64),
        ("executor_free_ns", np.int64),
        ("tick", np.int32),
        ("num_flights", np.int32),
        ("first_engine", np.int64),
        ("num_engines", np.int64),
        ("first_flight", np.int32),
        ("is_steady", np.int32),
        ("num_waited", np.int32),  # batches that held prompts back
        ("num_gathered", np.int32),  # of them, those when all engines had some
        ("received_step", np.int32),  # the step before which it looked for new requests
    ]
)

STEP = _record(
    [
        ("scheduled_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("delivered_ns", np.int64),
        ("decode_kv_tokens", np.int64),
        ("decode_kv_tokens_max", np.int32),
        ("num_tokens", np.int32),
        ("num_rows", np.int32),
        ("num_yielding", np.int32),
        ("num_output_tokens", np.int32),
        ("num_decodes", np.int32),
        ("num_prefills", np.int32),
        ("num_running", np.int32),
        ("num_waiting", np.int32),
        ("num_used_blocks", np.int32),
        ("num_preempted", np.int32),
        ("engine", np.int32),
        ("step", np.int32),
    ]
)

# `next` and `previous` link the free blocks, the longest unused first; `chain` those of a bucket.
BLOCK = _record(
    [
        ("key", np.int64),  # the name of its content, 0: none
        ("num_users", np.int32),
        ("next", np.int32),
        ("previous", np.int32),
        ("chain", np.int32),
    ]
)

# Memory below the device's, behind a link that reads and one that writes. What it keeps is a list,
# the longest unused first; `num_swapped` blocks are of requests that were swapped out.
TIER = _record(
    [
        ("capacity", np.int64),  # in blocks
        ("read_ns", np.int64),  # of a block
        ("write_ns", np.int64),
        ("read_free_ns", np.int64),
        ("write_free_ns", np.int64),
        ("num_swapped", np.int64),
        ("num_kept", np.int64),
        ("first_kept", np.int32),
        ("last_kept", np.int32),
    ]
)

# A block that a tier keeps; `next` links the spare ones, too.
STORED = _record(
    [
        ("key", np.int64),
        ("written_ns", np.int64),
        ("tier", np.int32),
        ("next", np.int32),
        ("previous", np.int32),
        ("chain", np.int32),
    ]
)

# Where the columns of `CostTables` lie, and their sizes.
TABLES = _record(
    [
        *((f"{name}_at", np.int64) for name in CostTables._fields),
        ("num_stages", np.int64),
        ("num_tokens", np.int64),
        ("num_rows", np.int64),
        ("num_seqs", np.int64),
        ("num_means", np.int64),
        ("num_raggedness", np.int64),
        ("num_mixed", np.int64),
        ("num_prefills", np.int64),
        ("num_contexts", np.int64),
        ("num_floor", np.int64),
        ("num_shared", np.int64),
    ]
)

# A piece of a prompt in a step; its tokens and the context before it are arrays of their own.
PREFILL = _record([("engine", np.int32), ("step", np.int32), ("request", np.int32)])

# Columns of the token runs.
RUN_COLUMNS = ("request", "first_step", "stride", "count", "engine", "attempt")
