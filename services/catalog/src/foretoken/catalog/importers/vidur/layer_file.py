"""The CSV files of a model's layer, as rows of the catalog."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers, Mask
from foretoken.catalog.importing import ImportNotes
from foretoken.catalog.sources.file import SourceFile
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.models.architecture import all_models
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.units import US_PER_MS
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

_STATISTICS = ("min", "max", "mean", "median", "std")
_MLP_COLUMNS = (
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_expanded_embd",
    "vocab_size",
    "use_gated_mlp",
    "num_tokens",
    "num_tensor_parallel_workers",
)
_ATTENTION_COLUMNS = (
    "n_embd",
    "n_q_head",
    "n_kv_head",
    "num_tensor_parallel_workers",
    "batch_size",
    "prefill_chunk_size",
    "kv_cache_size",
    "is_prefill",
    "attention_backend",
)
# Reshapes that launch no kernel: always 0.
_FREE_OPS = frozenset({"attn_input_reshape", "attn_output_reshape"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFile:
    """A file of one model on one device; `model` is a preset's name or the source's own."""

    source: SourceFile
    path: Path
    device: str
    model: str | None = None

    def facts(self, operator: str, kernel: str | None = None) -> RowFacts:
        """Return what its rows of an operator have in common."""
        return RowFacts(
            operator=operator,
            dtype="fp16",
            device=self.device,
            framework="vllm",
            kernel=kernel,
            model=self.model,
        )


@dataclass(frozen=True, slots=True)
class _Rank:
    """The dimensions of one tensor-parallel rank, a value per row."""

    hidden: Integers
    num_heads: Integers
    num_kv_heads: Integers
    head_dim: Integers

    @property
    def q_width(self) -> Integers:
        return self.num_heads * self.head_dim

    @property
    def qkv_width(self) -> Integers:
        return self.q_width + 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Everything the rows of an mlp.csv say."""

    rank: _Rank
    tokens: Integers
    intermediate: Integers
    vocab: Integers
    is_gated: Mask
    norm: str

    def gemm(self, n: Any, k: Any) -> Mapping[str, Any]:
        return {"m": self.tokens, "n": n, "k": k}

    def wide(self) -> Mapping[str, Any]:
        return {"num_tokens": self.tokens, "hidden": self.rank.hidden}

    def up_width(self) -> Integers:
        return np.where(self.is_gated, 2, 1) * self.intermediate


def _activation_dims(mlp: _Mlp) -> Mapping[str, Any]:
    return {"num_tokens": mlp.tokens, "intermediate": mlp.intermediate}


def _rope_dims(mlp: _Mlp) -> Mapping[str, Any]:
    rank = mlp.rank
    heads = {"num_heads": rank.num_heads, "num_kv_heads": rank.num_kv_heads}
    return {"num_tokens": mlp.tokens, **heads, "head_dim": rank.head_dim}


# Vidur's name of an op -> (operator, its dimensions). `norm` and `activation` depend on the rows.
_MLP_OPS: Mapping[str, tuple[str, Callable[[_Mlp], Mapping[str, Any]]]] = {
    # Times do not change with the rank's share of the vocabulary: a gather reads only its rows.
    "emb": ("embedding", lambda mlp: {**mlp.wide(), "vocab": mlp.vocab}),
    "input_layernorm": ("norm", _Mlp.wide),
    "attn_pre_proj": ("gemm", lambda mlp: mlp.gemm(mlp.rank.qkv_width, mlp.rank.hidden)),
    "attn_rope": ("rope", _rope_dims),
    "attn_post_proj": ("gemm", lambda mlp: mlp.gemm(mlp.rank.hidden, mlp.rank.q_width)),
    "post_attention_layernorm": ("norm", _Mlp.wide),
    "mlp_up_proj": ("gemm", lambda mlp: mlp.gemm(mlp.up_width(), mlp.rank.hidden)),
    "mlp_act": ("activation", _activation_dims),
    "mlp_down_proj": ("gemm", lambda mlp: mlp.gemm(mlp.rank.hidden, mlp.intermediate)),
    "add": ("residual_add", _Mlp.wide),
}


def read_mlp(file: LayerFile, notes: ImportNotes) -> tuple[SourceTable, pa.Table]:
    """Read an mlp.csv: all operators of a layer but attention, by token count and degree.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    origin = parse_csv(file.source, file.path, _MLP_COLUMNS)
    tp = origin.integers("num_tensor_parallel_workers")
    is_gated = origin.flags("use_gated_mlp")
    mlp = _Mlp(
        rank=_read_rank(origin, "n_head"),
        tokens=origin.integers("num_tokens"),
        intermediate=split_column(origin, "n_expanded_embd", tp),
        vocab=split_column(origin, "vocab_size", tp),
        is_gated=is_gated,
        norm=_norm_of(file.model, bool(is_gated.all())),
    )
    named = {
        "norm": {mlp.norm: np.ones(origin.num_rows, dtype=bool)},
        "activation": {"silu_mul": is_gated, "gelu": ~is_gated},
    }
    everywhere = np.ones(origin.num_rows, dtype=bool)
    pieces = []
    for op in _profiled_ops(origin):
        if op not in _MLP_OPS:
            notes.add(origin.source.name, f"{origin.num_rows} rows of unknown op {op!r}")
            continue
        kind, dims_of = _MLP_OPS[op]
        for operator, mask in named.get(kind, {kind: everywhere}).items():
            pieces.append(rows_of_op(origin, op, file.facts(operator), dims_of(mlp), mask))
    return origin, join_rows(pieces)


def read_attention(file: LayerFile, notes: ImportNotes) -> tuple[SourceTable, pa.Table]:
    """Read an attention.csv: every row is a prefill or a decode; the other's time in it is 0.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    origin = parse_csv(file.source, file.path, _ATTENTION_COLUMNS)
    rank = _read_rank(origin, "n_q_head")
    is_prefill = origin.flags("is_prefill")
    num_seqs, chunk = origin.integers("batch_size"), origin.integers("prefill_chunk_size")
    cached = origin.integers("kv_cache_size")
    heads = {"num_kv_heads": rank.num_kv_heads, "head_dim": rank.head_dim}
    # A decoding sequence also attends to the token it just stored: its context is one longer than
    # what was cached before, and never empty.
    context = cached + 1
    decode = {"num_seqs": num_seqs, "kv_tokens": num_seqs * context, "kv_tokens_max": context}
    new_tokens = np.where(is_prefill, num_seqs * chunk, num_seqs)
    everywhere = np.ones(origin.num_rows, dtype=bool)
    ops = {
        "attn_prefill": ("attention_prefill", prefill_dims(num_seqs, chunk, cached), is_prefill),
        "attn_decode": ("attention_decode", decode, ~is_prefill),
        "attn_kv_cache_save": ("kv_cache_write", {"num_tokens": new_tokens}, everywhere),
    }
    backends = origin.texts("attention_backend")
    pieces = []
    for op in _profiled_ops(origin):
        if op in _FREE_OPS:
            continue
        if op not in ops:
            notes.add(origin.source.name, f"{origin.num_rows} rows of unknown op {op!r}")
            continue
        operator, dims, mask = ops[op]
        queries = {} if operator == "kv_cache_write" else {"num_heads": rank.num_heads}
        for backend in np.unique(backends[mask]):
            kernel = str(backend).rsplit(".", maxsplit=1)[-1].lower() or None
            facts = file.facts(operator, kernel)
            of_backend = mask & (backends == backend)
            pieces.append(rows_of_op(origin, op, facts, {**dims, **queries, **heads}, of_backend))
    return origin, join_rows(pieces)


def _read_rank(origin: SourceTable, heads_column: str) -> _Rank:
    tp = origin.integers("num_tensor_parallel_workers")
    hidden = origin.integers("n_embd")
    num_kv_heads = origin.integers("n_kv_head")
    return _Rank(
        hidden=hidden,
        num_heads=split_column(origin, heads_column, tp),
        # Fewer key-value heads than ranks: each rank holds a copy of one.
        num_kv_heads=np.maximum(num_kv_heads // tp, 1),
        head_dim=split_column(origin, "n_embd", origin.integers(heads_column)),
    )


def split_column(origin: SourceTable, column: str, parts: Integers) -> Integers:
    """Return a column divided by another.

    Raises:
        InvalidRequestError: a cell does not divide; names the line.

    """
    whole = origin.integers(column)
    is_even = (parts > 0) & (whole % np.maximum(parts, 1) == 0)
    if not is_even.all():
        row = int(np.argmin(is_even))
        raise origin.fault(row, f"{column}: {whole[row]} does not divide by {parts[row]}")
    return whole // parts


def _norm_of(model: str | None, is_gated: bool) -> str:
    """Return the model's norm: by its preset, else the one that models with such an MLP use."""
    preset = all_models().get(model or "")
    return preset.norm if preset else "rms_norm" if is_gated else "layer_norm"


def _profiled_ops(origin: SourceTable) -> list[str]:
    names = [name.split(".") for name in origin.table.schema.names]
    stats = [parts[1] for parts in names if parts[0] == "time_stats" and len(parts) > 2]  # noqa: PLR2004
    return list(dict.fromkeys(stats))


def rows_of_op(
    origin: SourceTable, op: str, facts: RowFacts, dims: Mapping[str, Any], mask: Mask
) -> pa.Table:
    """Return the rows under a mask with the times that the file has for an op.

    Raises:
        InvalidRequestError: a statistic of the op is missing, or a cell is no number.

    """
    rows = np.flatnonzero(mask)
    latency_us: dict[str, Floats] = {
        statistic: origin.numbers(f"time_stats.{op}.{statistic}")[rows] * US_PER_MS
        for statistic in _STATISTICS
    }
    taken = {name: np.broadcast_to(value, len(mask))[rows] for name, value in dims.items()}
    return build_rows(facts, origin, rows, taken, latency_us)


def join_rows(pieces: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all pieces in one table, which may be empty."""
    return pa.concat_tables(pieces) if pieces else MEASUREMENT_SCHEMA.empty_table()
