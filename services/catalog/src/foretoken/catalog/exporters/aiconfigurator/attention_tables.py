"""How attention is written: into `context_*` and `generation_*` tables.

They know only batches of equal sequences, prefills without cache, and the widths of one model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from foretoken.catalog.dims import Mask
from foretoken.catalog.exporters.aiconfigurator.rows import Group, Writer, Written
from foretoken.catalog.importers.aiconfigurator.formats import (
    MLA_HEAD_DIMS,
    MLA_LATENT_DIMS,
    name_cell,
    name_scheme,
)
from foretoken.domain.errors import UnknownModelError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims

# The one architecture whose latent attention the module tables and our presets share.
_MLA_ARCHITECTURE = "DeepseekV3ForCausalLM"


def _write_attention(group: Group, *, is_prefill: bool) -> Written | None:
    cells = _attention_cells(group, group.texts["dtype"])
    if cells is None:
        return None
    group = group.take(_is_even_prefill(group) if is_prefill else _is_even_decode(group))
    dims = group.dims
    phase = "context" if is_prefill else "generation"
    columns = {
        "batch_size": dims["num_seqs"],
        "isl": dims["q_tokens"] // dims["num_seqs"] if is_prefill else 1,
        "num_heads": dims["num_heads"],
        "num_key_value_heads": dims["num_kv_heads"],
        "head_dim": dims["head_dim"],
        "window_size": dims.get("window", 0),
        "beam_width": 1,
        "attn_dtype": cells[0],
        "kv_cache_dtype": cells[1],
        "step": 0 if is_prefill else dims["kv_tokens_max"] - 1,
    }
    op_name = f"{phase}_attention"
    return Written(table=f"{op_name}_perf", op_name=op_name, group=group, columns=columns)


def _write_mla(group: Group, *, is_prefill: bool) -> Written | None:
    cells = _attention_cells(group, group.texts["dtype"])
    # vLLM's rows have the weights around the latent space in them, those of other engines not.
    scope = "unpacking" if group.texts["framework"] == "vllm" else ""
    if cells is None or group.facts.get("scope", "") != scope:
        return None
    widths = MLA_HEAD_DIMS if is_prefill else MLA_LATENT_DIMS
    is_even = _is_even_prefill(group) if is_prefill else _is_even_decode(group)
    group = group.take(is_even & _has_widths(group, widths))
    phase = "context" if is_prefill else "generation"
    columns = {
        "mla_dtype": cells[0],
        "kv_cache_dtype": cells[1],
        **_mla_columns(group, is_prefill=is_prefill),
    }
    return Written(table=f"{phase}_mla_perf", op_name=f"mla_{phase}", group=group, columns=columns)


def _write_mla_module(group: Group, *, is_prefill: bool) -> Written | None:
    attention = group.facts.get("attn", group.texts["dtype"])
    cells = _attention_cells(group, attention)
    scheme = name_scheme(group.texts["dtype"], group.facts.get("quant", ""))
    model = _latent_model(group.texts["model"])
    if cells is None or scheme is None or model is None or model.mla is None:
        return None
    widths = {
        "hidden": model.hidden,
        "q_lora_rank": model.mla.q_lora_rank,
        **MLA_LATENT_DIMS,
        **MLA_HEAD_DIMS,
    }
    is_even = _is_even_prefill(group) if is_prefill else _is_even_decode(group)
    group = group.take(is_even & _has_widths(group, widths))
    op_name = f"mla_{'context' if is_prefill else 'generation'}_module"
    columns = {
        "model": model.aliases[0],
        "architecture": _MLA_ARCHITECTURE,
        "mla_dtype": cells[0],
        "kv_cache_dtype": cells[1],
        "gemm_type": scheme,
        **_mla_columns(group, is_prefill=is_prefill),
    }
    return Written(table=f"{op_name}_perf", op_name=op_name, group=group, columns=columns)


def _latent_model(name: str) -> ModelArchitecture | None:
    """Return the preset of a model with latent attention that has a public name."""
    try:
        model = find_model(name)
    except UnknownModelError:
        return None
    return model if model.mla is not None and model.aliases else None


def _mla_columns(group: Group, *, is_prefill: bool) -> dict[str, Any]:
    dims = group.dims
    return {
        "num_heads": dims["num_heads"],
        "batch_size": dims["num_seqs"],
        "isl": dims["q_tokens"] // dims["num_seqs"] if is_prefill else 1,
        "tp_size": 1,
        "step": 0 if is_prefill else dims["kv_tokens_max"] - 1,
    }


def _attention_cells(group: Group, attention: str) -> tuple[str, str] | None:
    names = name_cell(attention), name_cell(group.facts.get("kv", attention))
    return None if None in names else (str(names[0]), str(names[1]))


def _is_even_prefill(group: Group) -> Mask:
    """Say which rows are batches of equal sequences without cache."""
    dims = group.dims
    q_len = dims["q_tokens"] // dims["num_seqs"]
    expected = (
        window_prefill_dims(dims["num_seqs"], q_len, dims["window"])
        if "window" in dims
        else prefill_dims(dims["num_seqs"], q_len, 0)
    )
    return _all([dims[name] == value for name, value in expected.items()])


def _is_even_decode(group: Group) -> Mask:
    """Say which rows are batches of equal sequences."""
    dims = group.dims
    is_even = dims["kv_tokens"] == dims["num_seqs"] * dims["kv_tokens_max"]
    if "window" in dims:
        visible = np.minimum(dims["kv_tokens_max"], dims["window"])
        is_even &= dims["visible_tokens"] == dims["num_seqs"] * visible
    return np.asarray(is_even)


def _has_widths(group: Group, widths: Mapping[str, int]) -> Mask:
    """Say which rows have the widths that the table leaves out."""
    return _all([group.dims[name] == value for name, value in widths.items()])


def _all(conditions: Sequence[Mask]) -> Mask:
    return np.asarray(np.logical_and.reduce(conditions), dtype=np.bool_)


def attention_writers() -> dict[str, Writer]:
    """Return the writers of all kinds of attention, by operator."""
    writers: dict[str, Writer] = {}
    for phase in ("prefill", "decode"):
        is_prefill = phase == "prefill"
        attention = partial(_write_attention, is_prefill=is_prefill)
        latent = partial(_write_mla, is_prefill=is_prefill)
        module = partial(_write_mla_module, is_prefill=is_prefill)
        writers |= {
            f"attention_{phase}": Writer(frozenset({"kv"}), attention),
            f"attention_{phase}_window": Writer(frozenset({"kv"}), attention),
            f"mla_{phase}": Writer(frozenset({"kv", "scope"}), latent),
            f"mla_{phase}_module": Writer(frozenset({"kv", "quant", "attn"}), module),
        }
    return writers
