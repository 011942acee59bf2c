"""Tables in AIConfigurator's layout, a row at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from foretoken.catalog.importers.aiconfigurator import IMPORTER
from foretoken.catalog.importing import ImportPlan, ImportRequest

COMMON = {
    "framework": "VLLM",
    "version": "0.24.0",
    "device": "NVIDIA H200",
    "op_name": "op",
    "kernel_source": "kernel",
}
GEMM = {"gemm_dtype": "bfloat16", "m": 4, "n": 8, "k": 16}
ATTENTION = {
    "batch_size": 2,
    "isl": 8,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "window_size": 0,
    "beam_width": 1,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "step": 0,
}
MLA = {
    "mla_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "num_heads": 16,
    "batch_size": 2,
    "isl": 8,
    "tp_size": 8,
    "step": 0,
}
MLA_MODULE = {
    "model": "deepseek-ai/DeepSeek-V3",
    "architecture": "DeepseekV3ForCausalLM",
    "gemm_type": "bfloat16",
    **MLA,
}
MOE = {
    "moe_dtype": "bfloat16",
    "num_tokens": 64,
    "hidden_size": 2048,
    "inter_size": 768,
    "topk": 8,
    "num_experts": 128,
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "distribution": "balanced",
}
NCCL = {"op_name": "all_gather", "nccl_dtype": "half", "num_gpus": 4, "message_size": 256}
ALL_REDUCE = {"allreduce_dtype": "bfloat16", "num_gpus": 4, "message_size": 256}


def write_table(path: Path, *rows: Mapping[str, Any], compression: str = "zstd") -> Path:
    """Write rows, completed by what every table has, as Parquet or as comma-separated values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = [{**COMMON, **row, "latency": row.get("latency", 0.5)} for row in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(whole), path, compression=compression)
    else:
        lines = [",".join(whole[0]), *(",".join(str(v) for v in row.values()) for row in whole)]
        path.write_text("\n".join(lines) + "\n")
    return path


def read_plan(path: Path, **changes: Any) -> ImportPlan:
    """Import a path."""
    return IMPORTER.read(ImportRequest(path=path, **changes))


def plan_table(plan: ImportPlan) -> pa.Table:
    """Return all rows of a plan."""
    return pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])


def plan_rows(plan: ImportPlan) -> list[dict[str, Any]]:
    """Return the rows of a plan, dims as a mapping."""
    return [{**row, "dims": dict(row["dims"])} for row in plan_table(plan).to_pylist()]
