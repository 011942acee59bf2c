"""The tables of GLM-5.3-Flash's latent attention, whose indexer scores pools of tokens.

A row has `x` new tokens after `prefix` cached ones in each sequence, or of decoding a token after
`x`. `geometry` is an object of sizes, those of a rank, and of formats.
Source: `sdk/models/glm53flash.py` of aisimulate 0.13 and the tables themselves.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from foretoken.catalog.importers.aiconfigurator.attention_tables import circumstances_of_attention
from foretoken.catalog.importers.aiconfigurator.formats import split_scheme
from foretoken.catalog.importers.aiconfigurator.perf_table import Circumstances, PerfTable
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.catalog.importing import name_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.visible_pairs import limited_pairs
from foretoken.domain.units import smaller

# Sizes of a block by what an object calls them.
_SIZES = {
    "num_heads": "num_heads",
    "hidden_size": "hidden",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "head_dim": "qk_nope_head_dim",
    "value_head_dim": "v_head_dim",
    "index_n_heads": "index_num_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "index_pool": "index_pool",
}
_MODEL = "zai-org/GLM-5.3-Flash"
# What attends, whatever the cache is in.
_ATTENTION = "bfloat16"


def read_pooled_attention(table: PerfTable) -> Iterator[Points]:
    """Yield whole blocks of new tokens, and of a token for each sequence."""
    described = table.describe(("component", "geometry"), _describe)
    codes, names = table.coded("geometry")
    num_seqs, new, cached = (table.integers(name) for name in ("batch_size", "x", "prefix"))
    for code, name in enumerate(names):
        rows, geometry = described.where(codes == code), _read_object(name)
        if not len(rows.rows):
            continue
        sizes = {own: geometry[said] for said, own in _SIZES.items()}
        limit = sizes["index_topk"]
        if geometry["is_context"]:
            batch = {
                **prefill_dims(num_seqs, new, cached),
                "selected_pairs": num_seqs * limited_pairs(new, cached, limit),
            }
            yield make_points("pooled_attention_prefill_module", table, rows, {**batch, **sizes})
        else:
            length = cached + new + 1
            batch = {
                "num_seqs": num_seqs,
                "kv_tokens": num_seqs * length,
                "kv_tokens_max": length,
                "selected_tokens": num_seqs * smaller(length, np.int64(limit)),
            }
            yield make_points("pooled_attention_decode_module", table, rows, {**batch, **sizes})


def _describe(said: Mapping[str, str]) -> Circumstances | str:
    geometry = _read_object(said["geometry"])
    if said["component"] != "attention" or geometry.get("layer_kind") != "sparse_mla":
        return f"{said['component']!r} of GLM-5.3-Flash is unknown here"
    if missing := [name for name in (*_SIZES, "is_context") if name not in geometry]:
        return f"geometry has no {', '.join(missing)}"
    scheme = split_scheme(str(geometry.get("projection_quant_mode")))
    if scheme is None:
        return f"projections in {geometry.get('projection_quant_mode')!r} are unknown here"
    dtype, quant = scheme
    facts = {"quant": quant, "attn": "" if dtype.name == "BF16" else "bf16"}
    cell = {**said, "kv_cache_dtype": str(geometry.get("kv_cache_dtype", ""))}
    model = name_model(_MODEL)
    return circumstances_of_attention(cell, _ATTENTION, facts, dtype=dtype, model=model)


def _read_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
