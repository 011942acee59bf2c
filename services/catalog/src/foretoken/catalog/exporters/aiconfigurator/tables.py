"""How a group of rows is written: into which table, and with which columns."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from foretoken.catalog.dims import Mask
from foretoken.catalog.exporters.aiconfigurator.attention_tables import attention_writers
from foretoken.catalog.exporters.aiconfigurator.rows import Group, Writer, Written
from foretoken.catalog.importers.aiconfigurator.formats import (
    COLLECTIVES,
    ENGINES,
    name_scheme,
)
from foretoken.catalog.importers.aiconfigurator.moe_table import (
    Routing,
    is_known_distribution,
    local_load,
)
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.measurements.estimate import DType

_UNGATED = "_nongated"


def write_group(group: Group) -> Written | None:
    """Return the columns for a group of rows; None where no table has words for it."""
    writer = _WRITERS.get(group.operator)
    if writer is None or group.texts["phase"] != "forward" or group.texts["status"] != "ok":
        return None
    if not set(group.facts) <= writer.facts:
        return None
    return writer.write(group)


def _write_gemm(group: Group) -> Written | None:
    scheme = name_scheme(group.texts["dtype"], group.facts.get("quant", ""))
    if scheme is None:
        return None
    columns = {"gemm_dtype": scheme, **{name: group.dims[name] for name in ("m", "n", "k")}}
    return Written(table="gemm_perf", op_name="gemm", group=group, columns=columns)


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


def _is_balanced(group: Group) -> Mask:
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


def _is_on_full_nodes(group: Group) -> Mask:
    """Say which rows ran on one node, or filled every node they ran on."""
    topology = group.texts["topology"]
    found = topology_of_device(group.texts["device"], topology)
    per_node = group.dims["devices_per_node"]
    return np.asarray(
        ((group.dims["num_nodes"] == 1) & (per_node <= found.devices_per_node))
        | (per_node == found.devices_per_node)
    )


_MOE = Writer(frozenset({"quant", "routing", "mlp"}), _write_moe)
_COLLECTIVE = Writer(frozenset({"lane"}), _write_collective)
_WRITERS: Mapping[str, Writer] = MappingProxyType(
    {
        "gemm": Writer(frozenset({"quant"}), _write_gemm),
        "moe_experts": _MOE,
        "moe_local_experts": _MOE,
        **attention_writers(),
        **dict.fromkeys(COLLECTIVES.values(), _COLLECTIVE),
    }
)
