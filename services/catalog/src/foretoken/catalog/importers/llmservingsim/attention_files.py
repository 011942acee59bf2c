"""`attention.csv` and `skew.csv`: batches of one prefill chunk and decoding sequences."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from foretoken.catalog.array import Floats, Integers
from foretoken.catalog.importers.llmservingsim.degree import Degree, Rows, join_rows, take_rows
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.operators.attention_prefill import prefill_dims

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
