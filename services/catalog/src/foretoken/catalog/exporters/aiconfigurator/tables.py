"""How a group of rows is written: into which table, and with which columns.

Each writer returns None for a group that its table has no words for, and otherwise the rows it has
room for: the tables know only batches of equal sequences, for instance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.catalog.exporters.aiconfigurator.rows import Group
from foretoken.catalog.importers.aiconfigurator.formats import (
    COLLECTIVES,
    ENGINES,
    MLA_HEAD_DIMS,
    MLA_LATENT_DIMS,
    name_cell,
    name_scheme,
)
from foretoken.catalog.importers.aiconfigurator.routing import (
    Routing,
    is_known_distribution,
    local_load,
)
from foretoken.domain.errors import UnknownModelError
from foretoken.domain.estimate import DType
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims

# The one architecture whose latent attention the module tables and our presets share.
_MLA_ARCHITECTURE = "DeepseekV3ForCausalLM"
_UNGATED = "_nongated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Columns of a table, one value per row of `group` or one for all, in the table's order."""

    table: str
    op_name: str
    group: Group
    columns: Mapping[str, Any]
    kernel: str = ""


def write_group(group: Group) -> Written | None:
    """Return the columns for a group of rows; None where no table has words for it."""
    writer = _WRITERS.get(group.operator)
    if writer is None or group.texts["phase"] != "forward" or group.texts["status"] != "ok":
        return None
    if not set(group.facts) <= writer.facts:
        return None
    return writer.write(group)


@dataclass(frozen=True, slots=True)
class _Writer:
    facts: frozenset[str]
    write: Callable[[Group], Written | None]


def _write_gemm(group: Group) -> Written | None:
    scheme = name_scheme(group.texts["dtype"], group.facts.get("quant", ""))
    if scheme is None:
        return None
    columns = {"gemm_dtype": scheme, **{name: group.dims[name] for name in ("m", "n", "k")}}
    return Written(table="gemm_perf", op_name="gemm", group=group, columns=columns)


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


def _write_moe(group: Group) -> Written | None:
    scheme = name_scheme(group.texts["dtype"], group.facts.get("quant", ""))
    distribution = group.facts.get("routing", "balanced")
    if scheme is None or not is_known_distribution(distribution):
        return None
    if "routing" not in group.facts:
        group = group.take(_is_balanced(group))
    dims = group.dims
    num_local = dims.get("num_local_experts", dims["num_experts"])
    kernel = group.texts["kernel"]
    if group.facts.get("mlp") == "ungated" and not kernel.endswith(_UNGATED):
        kernel += _UNGATED
    columns = {
        "moe_dtype": scheme,
        "num_tokens": dims["num_tokens"],
        "hidden_size": dims["hidden"],
        # The rank's share; the file's widest of the same layer decides later how many share it.
        "inter_size": dims["intermediate"],
        "topk": dims["top_k"],
        "num_experts": dims["num_experts"],
        "moe_tp_size": 1,
        "moe_ep_size": dims["num_experts"] // num_local,
        "distribution": distribution,
    }
    return Written(table="moe_perf", op_name="moe", group=group, columns=columns, kernel=kernel)


def _write_collective(group: Group) -> Written | None:
    dtype, is_engine = group.texts["dtype"], group.texts["framework"] in ENGINES
    if is_engine and group.operator != "all_reduce":
        return None
    cells = {"bf16": "bfloat16", "fp16": "float16"} if is_engine else {"fp16": "half"}
    cells |= {} if is_engine else {"bf16": "half", "int8": "int8", "fp8": "int8"}
    if dtype not in cells:
        return None
    element_bytes = int(DType[dtype.upper()].num_bytes)
    group = group.take(
        _is_on_full_nodes(group) & (group.dims["message_bytes"] % element_bytes == 0)
    )
    lane = group.facts.get("lane", "")
    column = "allreduce_dtype" if is_engine else "nccl_dtype"
    columns = {
        column: cells[dtype],
        "num_gpus": group.dims["devices_per_node"] * group.dims["num_nodes"],
        "message_size": group.dims["message_bytes"] // element_bytes,
    }
    if is_engine:
        columns["backend"] = "_".join(filter(None, (group.texts["framework"], lane)))
    names = {ours: theirs for theirs, ours in COLLECTIVES.items()}
    return Written(
        table="custom_allreduce_perf" if is_engine else "nccl_perf",
        op_name=names[group.operator],
        group=group,
        columns=columns,
    )


def _attention_cells(group: Group, attention: str) -> tuple[str, str] | None:
    names = name_cell(attention), name_cell(group.facts.get("kv", attention))
    return None if None in names else (str(names[0]), str(names[1]))


def _is_even_prefill(group: Group) -> npt.NDArray[np.bool_]:
    """Say which rows are batches of equal sequences without cache."""
    dims = group.dims
    q_len = dims["q_tokens"] // dims["num_seqs"]
    expected = (
        window_prefill_dims(dims["num_seqs"], q_len, dims["window"])
        if "window" in dims
        else prefill_dims(dims["num_seqs"], q_len, 0)
    )
    return _all([dims[name] == value for name, value in expected.items()])


def _is_even_decode(group: Group) -> npt.NDArray[np.bool_]:
    """Say which rows are batches of equal sequences."""
    dims = group.dims
    is_even = dims["kv_tokens"] == dims["num_seqs"] * dims["kv_tokens_max"]
    if "window" in dims:
        visible = np.minimum(dims["kv_tokens_max"], dims["window"])
        is_even &= dims["visible_tokens"] == dims["num_seqs"] * visible
    return np.asarray(is_even)


def _has_widths(group: Group, widths: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """Say which rows have the widths that the table leaves out."""
    return _all([group.dims[name] == value for name, value in widths.items()])


def _all(conditions: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.logical_and.reduce(conditions), dtype=np.bool_)


def _is_balanced(group: Group) -> npt.NDArray[np.bool_]:
    """Say which rows without a named routing reached as many experts as a balanced one does."""
    names = ("num_tokens", "top_k", "num_experts", "num_active_experts")
    keys = np.column_stack([group.dims[name] for name in names])
    local = group.dims.get("num_local_experts", group.dims["num_experts"])
    pairs = group.dims.get("num_local_pairs", group.dims["num_tokens"] * group.dims["top_k"])
    keys = np.column_stack([keys, group.dims["num_experts"] // local, pairs])
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    is_alike = []
    for num_tokens, top_k, num_experts, num_active, num_ranks, num_pairs in found.tolist():
        routing = Routing(num_tokens, top_k, num_experts, num_ranks, "balanced")
        load = None if routing.fault else local_load(routing)
        is_alike.append(
            load is not None and (load.num_pairs, load.num_active) == (num_pairs, num_active)
        )
    return np.array(is_alike, dtype=bool)[inverse.reshape(-1)]


def _is_on_full_nodes(group: Group) -> npt.NDArray[np.bool_]:
    """Say which rows ran on one node, or filled every node they ran on."""
    topology = group.texts["topology"]
    found = find_topology(topology) if topology else topology_of_device(group.texts["device"])
    per_node = group.dims["devices_per_node"]
    return np.asarray(
        ((group.dims["num_nodes"] == 1) & (per_node <= found.devices_per_node))
        | (per_node == found.devices_per_node)
    )


def _attention_writers() -> dict[str, _Writer]:
    writers: dict[str, _Writer] = {}
    for phase in ("prefill", "decode"):
        is_prefill = phase == "prefill"
        attention = partial(_write_attention, is_prefill=is_prefill)
        latent = partial(_write_mla, is_prefill=is_prefill)
        module = partial(_write_mla_module, is_prefill=is_prefill)
        writers |= {
            f"attention_{phase}": _Writer(frozenset({"kv"}), attention),
            f"attention_{phase}_window": _Writer(frozenset({"kv"}), attention),
            f"mla_{phase}": _Writer(frozenset({"kv", "scope"}), latent),
            f"mla_{phase}_module": _Writer(frozenset({"kv", "quant", "attn"}), module),
        }
    return writers


_MOE = _Writer(frozenset({"quant", "routing", "mlp"}), _write_moe)
_COLLECTIVE = _Writer(frozenset({"lane"}), _write_collective)
_WRITERS: Mapping[str, _Writer] = MappingProxyType(
    {
        "gemm": _Writer(frozenset({"quant"}), _write_gemm),
        "moe_experts": _MOE,
        "moe_local_experts": _MOE,
        **_attention_writers(),
        **dict.fromkeys(COLLECTIVES.values(), _COLLECTIVE),
    }
)
