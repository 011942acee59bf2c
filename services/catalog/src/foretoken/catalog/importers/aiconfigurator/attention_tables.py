"""The attention tables: `context_*` are prefills without cache, `generation_*` decode one token.

A row of a generation table has `isl` + `step` tokens of context. `num_key_value_heads` is 0 or
`num_heads` where every head has its own; `window_size` is 0 where a token sees all before it.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from foretoken.catalog.dims import Integers
from foretoken.catalog.importers.aiconfigurator.formats import (
    CELL_DTYPES,
    MLA_HEAD_DIMS,
    MLA_LATENT_DIMS,
    split_scheme,
)
from foretoken.catalog.importers.aiconfigurator.perf_table import Circumstances, PerfTable
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.domain.errors import UnknownModelError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims

# Heads of the layer that tables without a column `num_heads` split over `tp_size` ranks.
_MLA_HEADS = 128


def read_prefill(table: PerfTable) -> Iterator[Points]:
    """Yield prefills over the whole context and those over a window."""
    described = table.describe(("attn_dtype", "kv_cache_dtype", "beam_width"), _describe_attention)
    num_seqs, q_len, cached = (
        table.integers("batch_size"),
        table.integers("isl"),
        table.integers("step", 0),
    )
    window, heads = table.integers("window_size", 0), _heads(table)
    full = {**prefill_dims(num_seqs, q_len, cached), **heads}
    yield make_points("attention_prefill", table, described.where(window <= 0), full)
    part = {**window_prefill_dims(num_seqs, q_len, np.maximum(window, 1)), **heads}
    in_window = described.where(window > 0)
    fresh = in_window.where(cached == 0)
    table.leave_out(len(in_window.rows) - len(fresh.rows), "a window over cached tokens")
    yield make_points("attention_prefill_window", table, fresh, part)


def read_decode(table: PerfTable) -> Iterator[Points]:
    """Yield decode steps over the whole context and those over a window."""
    described = table.describe(("attn_dtype", "kv_cache_dtype", "beam_width"), _describe_attention)
    window, full = table.integers("window_size", 0), {**decode_columns(table), **_heads(table)}
    yield make_points("attention_decode", table, described.where(window <= 0), full)
    visible = full["num_seqs"] * np.minimum(full["kv_tokens_max"], window)
    part = {**full, "visible_tokens": visible, "window": window}
    yield make_points("attention_decode_window", table, described.where(window > 0), part)


def read_mla_prefill(table: PerfTable) -> Iterator[Points]:
    """Yield prefills of latent attention without its projections."""
    described = table.describe(("mla_dtype", "kv_cache_dtype"), _describe_mla)
    dims = {
        **prefill_dims(table.integers("batch_size"), table.integers("isl"), 0),
        "num_heads": _mla_heads(table),
        **MLA_HEAD_DIMS,
    }
    yield make_points("mla_prefill", table, described, dims)


def read_mla_decode(table: PerfTable) -> Iterator[Points]:
    """Yield decode steps of latent attention without its projections."""
    described = table.describe(("mla_dtype", "kv_cache_dtype"), _describe_mla)
    dims = {**decode_columns(table), "num_heads": _mla_heads(table), **MLA_LATENT_DIMS}
    yield make_points("mla_decode", table, described, dims)


def read_mla_prefill_module(table: PerfTable) -> Iterator[Points]:
    """Yield prefills of whole latent attention blocks."""
    batch = prefill_dims(table.integers("batch_size"), table.integers("isl"), 0)
    yield from _read_module("mla_prefill_module", table, batch)


def read_mla_decode_module(table: PerfTable) -> Iterator[Points]:
    """Yield decode steps of whole latent attention blocks."""
    yield from _read_module("mla_decode_module", table, decode_columns(table))


def _read_module(
    operator: str, table: PerfTable, batch: Mapping[str, Integers]
) -> Iterator[Points]:
    columns = ("mla_dtype", "kv_cache_dtype", "gemm_type", "model")
    described = table.describe(columns, _describe_module)
    codes, names = table.coded("model")
    for code, name in enumerate(names):
        rows = described.where(codes == code)
        if not len(rows.rows):
            continue
        model = find_model(name)
        if model.mla is not None:
            dims = {
                **batch,
                "num_heads": table.integers("num_heads"),
                "hidden": model.hidden,
                "q_lora_rank": model.mla.q_lora_rank,
                "kv_lora_rank": model.mla.kv_lora_rank,
                "qk_nope_head_dim": model.mla.qk_nope_head_dim,
                "qk_rope_head_dim": model.mla.qk_rope_head_dim,
                "v_head_dim": model.mla.v_head_dim,
            }
            yield make_points(operator, table, rows, dims)


def _heads(table: PerfTable) -> dict[str, Integers]:
    num_heads, num_kv_heads = table.integers("num_heads"), table.integers("num_key_value_heads")
    return {
        "num_heads": num_heads,
        "num_kv_heads": np.where(num_kv_heads == 0, num_heads, num_kv_heads),
        "head_dim": table.integers("head_dim"),
    }


def _mla_heads(table: PerfTable) -> Integers:
    if table.origin.has("num_heads"):
        return table.integers("num_heads")
    return np.asarray(_MLA_HEADS // np.maximum(table.integers("tp_size"), 1))


def decode_columns(table: PerfTable) -> dict[str, Integers]:
    """Return the batch dims of a generation table: `isl` + `step` tokens of context each."""
    num_seqs, kv_len = table.integers("batch_size"), table.integers("isl") + table.integers("step")
    return {"num_seqs": num_seqs, "kv_tokens": num_seqs * kv_len, "kv_tokens_max": kv_len}


def _describe_attention(said: Mapping[str, str]) -> Circumstances | str:
    if said["beam_width"] not in ("", "1"):
        return f"beam_width {said['beam_width']}: beams share their context, no operator has that"
    return circumstances_of_attention(said, said["attn_dtype"])


def _describe_mla(said: Mapping[str, str]) -> Circumstances | str:
    # vLLM's layer takes queries and latent vectors through the weights between latent vector and
    # heads as well. Source: collector/vllm/collect_mla.py, `mock_kv_b_proj`.
    scope = "unpacking" if said["framework"].lower() == "vllm" else ""
    return circumstances_of_attention(said, said["mla_dtype"], {"scope": scope})


def _describe_module(said: Mapping[str, str]) -> Circumstances | str:
    scheme, attention = split_scheme(said["gemm_type"]), CELL_DTYPES.get(said["mla_dtype"])
    if scheme is None or attention is None:
        return f"gemm_type {said['gemm_type']!r} with {said['mla_dtype']!r} is unknown here"
    try:
        model = find_model(said["model"])
    except UnknownModelError as err:
        return err.message
    if model.mla is None:
        return f"{model.name} has no latent attention"
    dtype, quant = scheme
    facts = {"quant": quant, "attn": "" if attention is dtype else attention.name.lower()}
    return circumstances_of_attention(said, said["mla_dtype"], facts, dtype=dtype, model=model.name)


def circumstances_of_attention(
    said: Mapping[str, str],
    attention: str,
    facts: Mapping[str, str] | None = None,
    *,
    dtype: DType | None = None,
    model: str | None = None,
) -> Circumstances | str:
    """Return the circumstances of attention in a format, `kv` said where the cache has another."""
    cache = said["kv_cache_dtype"] or attention
    if attention not in CELL_DTYPES or cache not in CELL_DTYPES:
        return f"attention in {attention!r} with a cache in {cache!r} is unknown here"
    is_same = CELL_DTYPES[attention] is CELL_DTYPES[cache]
    kv = "" if is_same else CELL_DTYPES[cache].name.lower()
    found = {**(facts or {}), "kv": kv}
    return Circumstances.of(said, dtype or CELL_DTYPES[attention], found, model=model)
