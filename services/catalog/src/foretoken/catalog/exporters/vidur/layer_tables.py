"""`mlp.csv` and `attention.csv`: many operators side by side in one row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.dims import Floats, Integers
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_MS
from foretoken.wire.arrow import dims_to_columns

STATISTICS = ("min", "max", "mean", "median", "std")


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows of one operator in the order of the catalog; times in ms, NaN where not known.

    `order` are the rows' places in what was exported.
    """

    order: Integers
    dims: Mapping[str, Integers]
    times_ms: Mapping[str, Floats]
    kernels: npt.NDArray[np.str_]

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self.kernels)

    def find(self, wanted: Mapping[str, int]) -> Integers:
        """Return the places of rows with these dimensions, whatever the others are."""
        mask = np.ones(self.num_rows, dtype=bool)
        for name, value in wanted.items():
            mask &= self.dims[name] == value
        return np.flatnonzero(mask)


def measure_operator(rows: pa.Table, operator: str) -> Measured:
    """Return the rows of an operator, which may be none; a column `order` numbers them."""
    found = rows.filter(pc.equal(rows["operator"], operator))
    return Measured(
        found["order"].to_numpy(),
        dims_to_columns(found, find_operator(operator).dim_names),
        {name: _to_ms(found[f"latency_us_{name}"]) for name in STATISTICS},
        np.array(pc.fill_null(found["kernel"], "").to_pylist(), dtype=str),
    )


def _to_ms(column: pa.ChunkedArray) -> Floats:
    """Return times in ms, such that those which came from ms become the very same numbers."""
    times_us = pc.fill_null(column, np.nan).to_numpy()
    times_ms = times_us / US_PER_MS
    for towards in (0.0, np.inf):
        near = np.nextafter(times_ms, towards)
        is_better = (times_ms * US_PER_MS != times_us) & (near * US_PER_MS == times_us)
        times_ms = np.where(is_better, near, times_ms)
    return np.asarray(times_ms, dtype=np.float64)


# Degrees of tensor parallelism that Vidur profiles, and those beyond.
DEGREES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Op:
    """One column of mlp.csv: rows of an operator with these dimensions, by token count."""

    operator: str
    tokens: str
    dims: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankShape:
    """A model on one of `tp` ranks. `vocab` is that of the model as it was measured."""

    model: ModelArchitecture
    tp: int
    vocab: int

    @property
    def is_whole(self) -> bool:
        """Whether the ranks have equal shares."""
        model = self.model
        return model.num_heads % self.tp == 0 == model.intermediate % self.tp

    @property
    def heads(self) -> Mapping[str, int]:
        """Dimensions of the heads of a rank; fewer key heads than ranks means a copy each."""
        return {"num_heads": self.model.num_heads // self.tp, **self.kv_heads}

    @property
    def kv_heads(self) -> Mapping[str, int]:
        """Dimensions of the key and value heads of a rank."""
        model = self.model
        return {"num_kv_heads": max(model.num_kv_heads // self.tp, 1), "head_dim": model.head_dim}

    def ops(self) -> Mapping[str, Op]:
        """Return the ops of mlp.csv in the order Vidur writes them."""
        model, hidden = self.model, self.model.hidden
        q_width = self.heads["num_heads"] * model.head_dim
        qkv_width = q_width + 2 * self.kv_heads["num_kv_heads"] * model.head_dim
        intermediate = model.intermediate // self.tp
        activation = "silu_mul" if model.is_gated else "gelu"
        up_width = (2 if model.is_gated else 1) * intermediate
        norm = Op(model.norm, "num_tokens", {"hidden": hidden})
        return {
            "emb": Op(
                "embedding", "num_tokens", {"hidden": hidden, "vocab": self.vocab // self.tp}
            ),
            "input_layernorm": norm,
            "attn_pre_proj": Op("gemm", "m", {"n": qkv_width, "k": hidden}),
            "attn_rope": Op("rope", "num_tokens", self.heads),
            "attn_post_proj": Op("gemm", "m", {"n": hidden, "k": q_width}),
            "post_attention_layernorm": norm,
            "mlp_up_proj": Op("gemm", "m", {"n": up_width, "k": hidden}),
            "mlp_act": Op(activation, "num_tokens", {"intermediate": intermediate}),
            "mlp_down_proj": Op("gemm", "m", {"n": hidden, "k": intermediate}),
            "add": Op("residual_add", "num_tokens", {"hidden": hidden}),
        }


# Ops whose times change with the degree: a degree without any of them was not measured.
SHARDED_OPS = (
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
)
# What Vidur does without an op: it counts these as 0, and stops without one of the others.
# Source: _load_compute_df and _train_compute_models of its SklearnExecutionTimePredictor.
EFFECT_OF_MISSING = {
    "emb": "does not read it",
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "add"), "takes it as 0"),
}


# Reshapes that launch no kernel: Vidur's files have columns of zeros for them.
_FREE_OPS = ("attn_input_reshape", "attn_output_reshape")

Row = dict[str, Any]


@dataclass(slots=True)
class Written:
    """Rows of a file, the places of the exported rows that went into them, and remarks."""

    rows: list[Row] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def use(self, measured: Measured, place: int) -> None:
        """Count an exported row, once however often it is written."""
        self.used.add(int(measured.order[place]))


def shapes_of(model: ModelArchitecture, measured: Mapping[str, Measured]) -> list[RankShape]:
    """Return the model on every number of ranks it divides by."""
    shapes = [RankShape(model, tp, model.vocab) for tp in DEGREES]
    whole = [shape for shape in shapes if shape.is_whole]
    vocab = _measured_vocab(model, measured, whole)
    return [RankShape(model, shape.tp, vocab) for shape in whole]


def _measured_vocab(
    model: ModelArchitecture, measured: Mapping[str, Measured], shapes: Sequence[RankShape]
) -> int:
    """Return the preset's vocabulary, unless another was measured: sources pad it differently."""
    embedding = measured["embedding"]
    found = embedding.dims["vocab"][embedding.find({"hidden": model.hidden})]
    if not len(found) or (found == model.vocab).any():
        return model.vocab
    degrees = [shape.tp for shape in shapes if _is_measured(shape, measured)]
    return int(found.max()) * min(degrees, default=1)


def _is_measured(shape: RankShape, measured: Mapping[str, Measured]) -> bool:
    """Return whether most ops of a degree have rows; one alone may be another degree's twin."""
    ops = shape.ops()
    sharded = [ops[name] for name in SHARDED_OPS]
    has_rows = [len(measured[op.operator].find(op.dims)) > 0 for op in sharded]
    return 2 * sum(has_rows) > len(has_rows)


def tabulate_mlp(shapes: Sequence[RankShape], measured: Mapping[str, Measured]) -> Written:
    """Return the rows of mlp.csv, of token counts that all ops of a degree were measured at.

    Vidur trains every op on all rows of a degree, so a row lacks none. Repeats of a token count
    stay repeats. Rows that fit several ops or degrees (both norms of a layer) are dealt out.
    """
    written = Written()
    shapes = [shape for shape in shapes if _is_measured(shape, measured)]
    parts = _deal(shapes, measured)
    for shape in shapes:
        ops = shape.ops()
        found = {name: parts[name, shape.tp] for name in ops if parts[name, shape.tp]}
        _note_missing(written, shape, [name for name in ops if name not in found])
        for tokens in sorted(set.union(*(set(part) for part in found.values())), reverse=True):
            places = [part.get(tokens, ()) for part in found.values()]
            for repeat in range(min(len(part) for part in places)):
                row: Row = {}
                for name, part in zip(found, places, strict=True):
                    found_of_op = measured[ops[name].operator]
                    row |= _times_of(name, found_of_op, part[repeat])
                    written.use(found_of_op, part[repeat])
                written.rows.append({**row, **_about(shape), "num_tokens": tokens})
    return written


def _about(shape: RankShape) -> Row:
    model = shape.model
    return {
        "n_head": model.num_heads,
        "n_kv_head": model.num_kv_heads,
        "n_embd": model.hidden,
        "n_expanded_embd": model.intermediate,
        "vocab_size": shape.vocab,
        "use_gated_mlp": model.is_gated,
        "num_tensor_parallel_workers": shape.tp,
    }


def _deal(
    shapes: Sequence[RankShape], measured: Mapping[str, Measured]
) -> dict[tuple[str, int], dict[int, Integers]]:
    """Return the rows of every op and degree by token count."""
    takers: dict[Any, list[tuple[str, int]]] = {}
    for name in shapes[0].ops() if shapes else ():
        for shape in shapes:
            op = shape.ops()[name]
            key = (op.operator, op.tokens, tuple(op.dims.items()))
            takers.setdefault(key, []).append((name, shape.tp))
    parts: dict[tuple[str, int], dict[int, Integers]] = {}
    for (operator, tokens, dims), sharers in takers.items():
        parts |= {sharer: {} for sharer in sharers}
        places = measured[operator].find(dict(dims))
        counts = measured[operator].dims[tokens][places]
        for count in np.unique(counts).tolist():
            same = places[counts == count]
            is_enough = len(same) >= len(sharers)
            shares = np.array_split(same, len(sharers)) if is_enough else [same] * len(sharers)
            for sharer, share in zip(sharers, shares, strict=True):
                parts[sharer][count] = share
    return parts


def _note_missing(written: Written, shape: RankShape, missing: Sequence[str]) -> None:
    for name in missing:
        effect = EFFECT_OF_MISSING.get(name, "stops")
        operator = shape.ops()[name].operator
        written.notes.append(f"no {operator} for {name} at tp={shape.tp}: Vidur {effect}")


def _times_of(op: str, measured: Measured, place: int) -> Row:
    return {
        f"time_stats.{op}.{statistic}": measured.times_ms[statistic][place]
        for statistic in STATISTICS
    }


def tabulate_attention(
    shapes: Sequence[RankShape], measured: Mapping[str, Measured], block_size: int
) -> Written:
    """Return the rows of attention.csv: batches of equal sequences, all prefill or all decode."""
    written = Written()
    rows = [row for shape in shapes for row in _batches(shape, measured, written)]
    _add_cache_writes(rows, measured["kv_cache_write"], written)
    longest = max((row["prefill_chunk_size"] + row["kv_cache_size"] for row in rows), default=0)
    for row in rows:
        kernel = row.pop("kernel")
        del row["kv_heads"]
        row["block_size"], row["max_model_len"] = block_size, longest
        row["attention_backend"] = f"AttentionBackend.{kernel.upper()}" if kernel else ""
    written.rows = rows
    return written


def _batches(shape: RankShape, measured: Mapping[str, Measured], written: Written) -> Iterator[Row]:
    nothing = {f"time_stats.{op}.{statistic}": 0.0 for op in _FREE_OPS for statistic in STATISTICS}
    for op, operator in (
        ("attn_prefill", "attention_prefill"),
        ("attn_decode", "attention_decode"),
    ):
        found = measured[operator]
        other = "attn_decode" if op == "attn_prefill" else "attn_prefill"
        idle = {f"time_stats.{other}.{statistic}": 0.0 for statistic in STATISTICS}
        for place in found.find(shape.heads).tolist():
            dims = {name: int(column[place]) for name, column in found.dims.items()}
            batch = _prefill_batch(dims) if op == "attn_prefill" else _decode_batch(dims)
            if batch is None:
                continue
            written.use(found, place)
            yield {
                **nothing,
                **idle,
                **_times_of(op, found, place),
                "n_embd": shape.model.hidden,
                "n_q_head": shape.model.num_heads,
                "n_kv_head": shape.model.num_kv_heads,
                "num_tensor_parallel_workers": shape.tp,
                **batch,
                "is_prefill": op == "attn_prefill",
                "kernel": str(found.kernels[place]),
                "kv_heads": shape.kv_heads["num_kv_heads"],
            }


def _prefill_batch(dims: Mapping[str, int]) -> Row | None:
    """Return the batch, None if its sequences are not equal."""
    num_seqs = dims["num_seqs"]
    chunk = dims["q_tokens"] // num_seqs
    cached = dims["kv_tokens"] // num_seqs - chunk
    expected = prefill_dims(num_seqs, chunk, cached)
    if any(dims[name] != value for name, value in expected.items()):
        return None
    return {"batch_size": num_seqs, "prefill_chunk_size": chunk, "kv_cache_size": cached}


def _decode_batch(dims: Mapping[str, int]) -> Row | None:
    """Return the batch, None if its sequences are not equal; the new token is not cached yet."""
    if dims["kv_tokens"] != dims["num_seqs"] * dims["kv_tokens_max"]:
        return None
    cached = dims["kv_tokens_max"] - 1
    return {"batch_size": dims["num_seqs"], "prefill_chunk_size": 0, "kv_cache_size": cached}


def _add_cache_writes(rows: Sequence[Row], writes: Measured, written: Written) -> None:
    """Give every batch a write of as many tokens; those there are get dealt out in order."""
    if not writes.num_rows:
        written.notes.append("no kv_cache_write: Vidur takes attn_kv_cache_save as 0")
        return
    takers: dict[tuple[int, int, str], list[Row]] = {}
    for row in rows:
        new_tokens = row["batch_size"] * max(row["prefill_chunk_size"], 1)
        takers.setdefault((row["kv_heads"], new_tokens, row["kernel"]), []).append(row)
    for (kv_heads, new_tokens, kernel), batches in takers.items():
        found = writes.find({"num_kv_heads": kv_heads, "num_tokens": new_tokens})
        of_kernel = found[writes.kernels[found] == kernel]
        places = of_kernel if len(of_kernel) else found
        for index, batch in enumerate(batches if len(places) else ()):
            step = index if len(places) >= len(batches) else index * len(places) // len(batches)
            batch.update(_times_of("attn_kv_cache_save", writes, int(places[step])))
            written.use(writes, int(places[step]))
