"""All CSV files of a variant: layers by name, attention, and the expert layers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers
from foretoken.catalog.importers.llmservingsim.variant import (
    Degree,
    RankDims,
    Rows,
    Variant,
    join_rows,
    take_rows,
)
from foretoken.catalog.importing import ImportNotes
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.attention_prefill import prefill_dims

DimsOfRows = Callable[[Integers, RankDims], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Layer:
    """An operator, its dimensions for a column of token or sequence counts, and a flag."""

    operator: str
    dims: DimsOfRows
    flag: str = ""


def _gemm(n: Callable[[RankDims], int], k: Callable[[RankDims], int]) -> Layer:
    return Layer("gemm", lambda tokens, rank: {"m": tokens, "n": n(rank), "k": k(rank)})


def _q_width(rank: RankDims) -> int:
    return rank.num_heads * rank.head_dim


def _qkv_width(rank: RankDims) -> int:
    return (rank.num_heads + 2 * rank.num_kv_heads) * rank.head_dim


def _hidden(rank: RankDims) -> int:
    return rank.hidden


def _wide(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    return {"num_tokens": tokens, "hidden": rank.hidden}


def _embedding(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    return {"num_tokens": tokens, "hidden": rank.hidden, "vocab": rank.vocab}


def _rope(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    heads = {"num_heads": rank.num_heads, "num_kv_heads": rank.num_kv_heads}
    return {"num_tokens": tokens, **heads, "head_dim": rank.head_dim}


def _qk_norm(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    rows = tokens * (rank.num_heads + rank.num_kv_heads) // 2
    return {"num_tokens": rows, "hidden": rank.head_dim}


def _activation(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    return {"num_tokens": tokens, "intermediate": rank.intermediate}


def _sampler(sequences: Integers, rank: RankDims) -> Mapping[str, Any]:
    # Every rank draws from the gathered logits.
    return {"num_seqs": sequences, "vocab": rank.logits}


# The profiler divides a layer's time by its calls, so that unlike calls become their mean: kept,
# under the operator that comes nearest, and flagged.
LAYERS: Mapping[str, Layer] = {
    "embedding": Layer("embedding", _embedding),
    "layernorm": Layer(
        "add_rms_norm",
        _wide,
        "mean_of_calls: of a norm that adds the residual, and of a model's first, which has none",
    ),
    "qkv_proj": _gemm(_qkv_width, _hidden),
    "qk_norm": Layer(
        "rms_norm",
        _qk_norm,
        "mean_of_calls: of the norm of the queries and the norm of the keys",
    ),
    "rotary_emb": Layer("rope", _rope),
    "o_proj": _gemm(_hidden, _q_width),
    "gate_up_proj": _gemm(lambda rank: 2 * rank.intermediate, _hidden),
    "act_fn": Layer("silu_mul", _activation),
    "down_proj": _gemm(_hidden, lambda rank: rank.intermediate),
    # vLLM adds the last residual in the same kernel.
    "final_layernorm": Layer("add_rms_norm", _wide),
    "lm_head": _gemm(lambda rank: rank.vocab, _hidden),
    "sampler": Layer("sampler", _sampler),
}


_GRID_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_SKEW_COLUMNS = ("pc", "kp", "n", "nb", "kvs", "kv_big")
# How far the ratio of a sum to its mean may be off the number of iterations.
_SUM_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class _Batches:
    """A batch per row: a chunk over its cached context, and sequences of which one is longest.

    Contexts of decoding sequences count the token they just stored.
    """

    chunk: Integers
    cached: Integers
    num_seqs: Integers
    kv_tokens: Integers
    kv_tokens_max: Integers


def read_attention(degree: Degree) -> Rows:
    """Read the grid, in which all decoding sequences have the same context."""
    origin = degree.open("attention", (*_GRID_COLUMNS, "time_us"))
    chunk, cached, num_seqs, kv_decode = (origin.integers(name) for name in _GRID_COLUMNS)
    context = kv_decode + 1
    batches = _Batches(chunk, cached, num_seqs, num_seqs * context, context)
    degree.note("attention", "the times hold the write to the KV cache too")
    return origin, _rows_of(degree, origin, batches, origin.numbers("time_us"))


def read_skew(degree: Degree, attention: SourceTable) -> Rows:
    """Read the batches in which `nb` sequences have a larger context than the rest.

    The times are sums over the iterations in some versions of the profiler and means in others;
    the even batches that this file shares with `attention.csv` tell which.
    """
    origin = degree.open("skew", (*_SKEW_COLUMNS, "t_max_us", "t_skew_us"))
    chunk, cached, num_seqs, num_big, small, big = (origin.integers(name) for name in _SKEW_COLUMNS)
    even = {"prefill_chunk": chunk, "kv_prefill": cached, "n_decode": num_seqs, "kv_decode": big}
    ratio = _ratio_to_grid(even, origin.numbers("t_max_us"), attention)
    divisors = (1, degree.variant.num_iterations)
    divisor = next((d for d in divisors if abs(ratio / d - 1) < _SUM_TOLERANCE), None)
    if divisor is None:
        degree.note("skew", f"not read: its times are {ratio:.3g} times those of attention.csv")
        return origin, join_rows([])
    degree.note("skew", "t_mean_us and t_max_us are not read: even batches, as in attention.csv")
    kv_tokens = num_big * (big + 1) + (num_seqs - num_big) * (small + 1)
    batches = _Batches(chunk, cached, num_seqs, kv_tokens, np.maximum(big, small) + 1)
    return origin, _rows_of(degree, origin, batches, origin.numbers("t_skew_us") / divisor)


def _ratio_to_grid(even: dict[str, Integers], times_us: Floats, attention: SourceTable) -> float:
    """Return the median ratio of times to those of the same batches in the grid, or NaN."""
    grid_columns = [attention.integers(name) for name in even]
    grid = dict(zip(zip(*grid_columns, strict=True), attention.numbers("time_us"), strict=True))
    keys = zip(*even.values(), strict=True)
    ratios = [t / grid[key] for key, t in zip(keys, times_us, strict=True) if key in grid]
    return float(np.nanmedian(ratios)) if ratios else float("nan")


def _rows_of(degree: Degree, origin: SourceTable, batches: _Batches, times_us: Floats) -> pa.Table:
    rank = degree.rank
    heads = {
        "num_heads": rank.num_heads,
        "num_kv_heads": rank.num_kv_heads,
        "head_dim": rank.head_dim,
    }
    has_prefill, has_decode = batches.chunk > 0, batches.num_seqs > 0
    if not (has_prefill | has_decode).all():
        raise origin.fault(int(np.argmin(has_prefill | has_decode)), "the batch is empty")
    prefill = prefill_dims(1, batches.chunk, batches.cached)
    decode = {
        "num_seqs": batches.num_seqs,
        "kv_tokens": batches.kv_tokens,
        "kv_tokens_max": batches.kv_tokens_max,
    }
    mixed = {
        **prefill,
        "num_decode_seqs": batches.num_seqs,
        "decode_kv_tokens": batches.kv_tokens,
        "decode_kv_tokens_max": batches.kv_tokens_max,
    }
    kinds = (
        ("attention_prefill", prefill, has_prefill & ~has_decode),
        ("attention_decode", decode, has_decode & ~has_prefill),
        ("attention_mixed", mixed, has_prefill & has_decode),
    )
    return join_rows(
        [
            take_rows(degree.facts(operator), origin, mask, {**dims, **heads}, times_us)
            for operator, dims, mask in kinds
            if mask.any()
        ]
    )


# Files by layer name, and their column that counts tokens or sequences.
_NAMED_FILES: Mapping[str, str] = {"dense": "tokens", "per_sequence": "sequences"}
_KNOWN_FILES = frozenset({*_NAMED_FILES, "attention", "moe", "skew"})


def read_layers(variant: Variant, notes: ImportNotes) -> Iterator[Rows]:
    """Yield every file of a variant that holds measurements, with its rows.

    Raises:
        InvalidRequestError: a file lacks a column, or a cell cannot be used.

    """
    lowest: dict[str, SourceTable] = {}
    for tp in variant.degrees:
        degree = Degree(variant, tp, notes)
        stems = degree.list_stems()
        for stem in stems:
            if stem not in _KNOWN_FILES:
                is_fit = stem == "skew_fit"
                degree.note(stem, "a fit, not measurements" if is_fit else "not known here")
        for stem in (stem for stem in _NAMED_FILES if stem in stems):
            origin, rows = _read_named(degree, stem, lowest.get(stem))
            lowest.setdefault(stem, origin)
            yield origin, rows
        if "attention" in stems:
            attention = read_attention(degree)
            yield attention
            if "skew" in stems:
                yield read_skew(degree, attention[0])
        elif "skew" in stems:
            degree.note("skew", "not read: its times cannot be estimated without attention.csv")
        if "moe" in stems:
            yield _read_experts(degree)


def _read_named(degree: Degree, stem: str, lowest: SourceTable | None) -> Rows:
    """Read a file of named layers; `lowest` is that file at the lowest degree."""
    column = _NAMED_FILES[stem]
    origin = degree.open(stem, ("layer", column, "time_us"))
    names, counts = origin.texts("layer"), origin.integers(column)
    times_us = origin.numbers("time_us")
    pieces = []
    for name in dict.fromkeys(names.tolist()):
        mask = names == name
        layer = LAYERS.get(name)
        if layer is None:
            degree.note(stem, f"{mask.sum()} rows of the unknown layer {name!r} are not read")
        elif lowest is not None and _is_copy(lowest, name, times_us[mask]):
            degree.note(stem, f"{mask.sum()} rows of {name} are copied from the lowest degree")
        else:
            facts = degree.facts(layer.operator, flag=layer.flag)
            dims = layer.dims(counts, degree.rank)
            pieces.append(take_rows(facts, origin, mask, dims, times_us))
    return origin, join_rows(pieces)


def _is_copy(lowest: SourceTable, name: str, times_us: Floats) -> bool:
    """Return whether the lowest degree has the very same times.

    The profiler measures some layers at one degree and writes them to all; of a layer whose size
    depends on the degree that is wrong, of the others it says nothing new.
    """
    known = lowest.numbers("time_us")[lowest.texts("layer") == name]
    return np.array_equal(known, times_us, equal_nan=True)


def _read_experts(degree: Degree) -> Rows:
    model = degree.variant.model
    origin = degree.open("moe", ("tokens", "activated_experts", "time_us"))
    if model.moe is None:
        raise InvalidRequestError.of_field("path", f"{origin.path}: {model.name} has no experts")
    dims = {
        "num_tokens": origin.integers("tokens"),
        "top_k": model.moe.top_k,
        "num_experts": model.moe.num_experts,
        "num_active_experts": origin.integers("activated_experts"),
        "hidden": model.hidden,
        "intermediate": model.moe.expert_intermediate // degree.tp,
    }
    degree.note("moe", "the times hold the router too")
    everywhere = np.ones(origin.num_rows, dtype=bool)
    facts = degree.facts("moe_experts", kernel="moe_block_with_router")
    return origin, take_rows(facts, origin, everywhere, dims, origin.numbers("time_us"))
