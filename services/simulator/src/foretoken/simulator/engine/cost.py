"""The cost tables of an engine and of its draft, in memory that compiled code finds by itself.

Handed over as arguments each of their arrays would be unpacked at every call from Python.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretoken.simulator.cost.tables import CostTables, StepShape, shared_us, stage_us
from foretoken.simulator.engine.layout import TABLES, Ints, Records, State, as_int64
from foretoken.simulator.engine.view import array_at, pointer
from foretoken.simulator.jit import compiled_part

TARGET, DRAFT = 0, 1
# Where the sizes of the arrays are read: a field of `TABLES`, a table, its axis.
_SIZES = (
    ("num_stages", "tokens_us", 0),
    ("num_tokens", "tokens_us", 2),
    ("num_rows", "rows_us", 1),
    ("num_seqs", "decode_seqs", 0),
    ("num_means", "decode_mean", 0),
    ("num_raggedness", "decode_raggedness", 0),
    ("num_mixed", "mixed_prefill", 0),
    ("num_prefills", "prefill_tokens", 0),
    ("num_contexts", "prefill_context", 0),
    ("num_floor", "floor_us", 2),
    ("num_shared", "shared", 2),
)


def place_tables(tables: Sequence[CostTables]) -> tuple[Records, list[Records]]:
    """Return records that say where tables lie in memory, and the arrays that must stay there."""
    places = np.zeros(len(tables), dtype=TABLES)
    kept: list[Records] = []
    for place, each in zip(places, tables, strict=True):
        for field, name, axis in _SIZES:
            place[field] = getattr(each, name).shape[axis]
        for name, column in each._asdict().items():
            kept.append(np.ascontiguousarray(column, dtype=np.float64))
            place[f"{name}_at"] = kept[-1].ctypes.data
    return places, kept


@compiled_part
def tables_of(state: State, which: int) -> CostTables:
    """Return the tables of the engines, or of their draft."""
    at: Any = array_at(pointer(state.tables_at), 2, TABLES)[which]
    real, stages, seqs = np.float64, at.num_stages, at.num_seqs
    means, raggedness = at.num_means, at.num_raggedness
    prefills = (stages, at.num_prefills, at.num_contexts)
    return CostTables(
        array_at(pointer(at.tokens_us_at), (stages, 2, at.num_tokens), real),
        array_at(pointer(at.rows_us_at), (stages, at.num_rows), real),
        array_at(pointer(at.decode_seqs_at), seqs, real),
        array_at(pointer(at.decode_mean_at), means, real),
        array_at(pointer(at.decode_raggedness_at), raggedness, real),
        array_at(pointer(at.decode_us_at), (stages, seqs, means, raggedness), real),
        array_at(pointer(at.mixed_prefill_at), at.num_mixed, real),
        array_at(pointer(at.mixed_us_at), (stages, at.num_mixed, seqs, means, raggedness), real),
        array_at(pointer(at.prefill_tokens_at), at.num_prefills, real),
        array_at(pointer(at.prefill_context_at), at.num_contexts, real),
        array_at(pointer(at.prefill_us_at), prefills, real),
        array_at(pointer(at.prefill_more_us_at), prefills, real),
        array_at(pointer(at.floor_us_at), (stages, 2, at.num_floor), real),
        array_at(pointer(at.shared_at), (stages, 4, at.num_shared), real),
        array_at(pointer(at.stretch_at), (3, 2), real),
    )


@compiled_part
def draft_us(state: State, shape: StepShape, prefill_tokens: Ints, prefill_context: Ints) -> float:
    """Return the time of the draft's passes in a step, in µs.

    The first is over all tokens, brings the draft's KV cache up to date, prompts too, and proposes
    a token for every sequence; each other proposes the next of every sequence. Contexts count as if
    all drafts were accepted, as the engine's own do. Source: vLLM 0.20, v1/spec_decode/eagle.py.
    """
    tables = tables_of(state, DRAFT)
    num_seqs = as_int64(shape.num_decodes + shape.num_prefills)
    kv_tokens, longest = shape.decode_kv_tokens, shape.decode_kv_tokens_max
    for index in range(shape.num_prefills):
        context = as_int64(prefill_context[index]) + prefill_tokens[index]
        kv_tokens += context
        longest = max(longest, context)
    first = StepShape(
        shape.num_tokens,
        num_seqs,
        shape.num_decodes,
        shape.decode_kv_tokens,
        shape.decode_kv_tokens_max,
        shape.num_prefills,
    )
    total_us = stage_us(tables, 0, first, prefill_tokens, prefill_context)
    for place in range(1, state.num_draft_passes):
        more = kv_tokens + place * num_seqs
        each = StepShape(num_seqs, num_seqs, num_seqs, more, longest + place, as_int64(0))
        total_us += stage_us(tables, 0, each, prefill_tokens[:0], prefill_context[:0])
    return float(total_us)


@compiled_part
def draft_shared_us(state: State, num_tokens: int, num_seqs: int) -> float:
    """Return what the drafts of engines in lock step take together, in µs."""
    tables = tables_of(state, DRAFT)
    others_us = (state.num_draft_passes - 1) * shared_us(tables, 0, num_seqs)
    return float(shared_us(tables, 0, num_tokens) + others_us)
