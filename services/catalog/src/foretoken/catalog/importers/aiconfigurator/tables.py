"""What each of AIConfigurator's tables measured, as operators of the catalog.

Source of those of single kernels around attention:
collector/*/collect_{attn_encoder,mhc_module,mla_bmm,computescale}.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from foretoken.catalog.dims import Integers
from foretoken.catalog.importers.aiconfigurator.attention_tables import (
    read_decode,
    read_mla_decode,
    read_mla_decode_module,
    read_mla_prefill,
    read_mla_prefill_module,
    read_prefill,
)
from foretoken.catalog.importers.aiconfigurator.exchange_table import (
    COLUMNS,
    TIMES,
    read_low_latency_exchange,
)
from foretoken.catalog.importers.aiconfigurator.formats import (
    CELL_DTYPES,
    COLLECTIVES,
    MLA_HEAD_DIMS,
    MLA_LATENT_DIMS,
    split_scheme,
)
from foretoken.catalog.importers.aiconfigurator.linear_tables import (
    read_gated_delta,
    read_kda,
    read_mamba2,
)
from foretoken.catalog.importers.aiconfigurator.moe_table import read_moe
from foretoken.catalog.importers.aiconfigurator.perf_table import (
    Circumstances,
    Described,
    PerfTable,
    topology_of,
)
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.catalog.importers.aiconfigurator.pooled_tables import read_pooled_attention
from foretoken.catalog.importers.aiconfigurator.sparse_tables import (
    read_compressed_decode,
    read_compressed_prefill,
    read_dsa_decode,
    read_dsa_prefill,
    read_msa_decode,
    read_msa_prefill,
)
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import ceil_divide

# TensorRT-LLM's kernel that has its weights in bf16 by then; its kernel of scaled blocks.
_UNPACKED, _BLOCKS = "_dequant_bf16", "_block_scaling_"


def read_encoder_attention(table: PerfTable) -> Iterator[Points]:
    """Yield the attention of encoders over equal sequences."""
    num_seqs, length = table.integers("batch_size"), table.integers("isl")
    dims = {
        "num_seqs": num_seqs,
        "num_tokens": num_seqs * length,
        "score_pairs": num_seqs * length * length,
        "num_heads": table.integers("num_heads"),
        "head_dim": table.integers("head_dim"),
    }
    described = table.describe(("attn_dtype",), lambda said: _plain(said, said["attn_dtype"]))
    yield make_points("encoder_attention", table, described, dims)


def read_hyper_connections(table: PerfTable) -> Iterator[Points]:
    """Yield hyper-connections; a row has the time of `num_sites` of them, one after the other."""
    described = table.describe((), lambda said: Circumstances.of(said, DType.BF16, {}))
    dims = {
        "num_tokens": table.integers("num_tokens"),
        "num_streams": table.integers("hc_mult"),
        "hidden": table.integers("hidden_size"),
        "sinkhorn_steps": table.integers("sinkhorn_iters"),
    }
    codes, names = table.coded("op_name")
    for code, name in enumerate(names):
        rows = described.where(codes == code)
        if name in ("pre", "post"):
            num_sites = table.integers("num_sites")
            yield make_points(f"mhc_{name}", table, rows, dims, num_calls=num_sites)
        else:
            table.leave_out(len(rows.rows), f"{name!r} of mHC is unknown here")


def read_latent_products(table: PerfTable) -> Iterator[Points]:
    """Yield the products that take queries to the latent space and values back, by head."""
    described = table.describe(("bmm_dtype",), _describe_product)
    codes, names = table.coded("op_name")
    inner, latent = MLA_HEAD_DIMS["qk_nope_head_dim"], MLA_LATENT_DIMS["kv_lora_rank"]
    sides = {"mla_gen_pre": (latent, inner), "mla_gen_post": (MLA_HEAD_DIMS["v_head_dim"], latent)}
    batch = {"batch": table.integers("num_heads"), "m": table.integers("num_tokens")}
    for code, name in enumerate(names):
        rows = described.where(codes == code)
        if name in sides:
            n, k = sides[name]
            yield make_points("batched_gemm", table, rows, {**batch, "n": n, "k": k})
        else:
            table.leave_out(len(rows.rows), f"{name!r} of latent attention is unknown here")


def read_quantize(table: PerfTable) -> Iterator[Points]:
    """Yield the parts of quantising activations: finding the scale, and scaling by it."""
    dims = {"num_tokens": table.integers("m"), "hidden": table.integers("k")}
    yield make_points("quantize", table, table.describe(("quant_dtype",), _describe_part), dims)


def _describe_part(said: Mapping[str, str]) -> Circumstances | str:
    parts = {"compute_scale": "scale", "scale_matrix": "convert"}
    if said["op_name"] not in parts:
        return f"{said['op_name']!r} is unknown here"
    return _plain(said, said["quant_dtype"], {"part": parts[said["op_name"]]})


def _describe_product(said: Mapping[str, str]) -> Circumstances | str:
    cell, kernel = said["bmm_dtype"], said["kernel_source"]
    if kernel.endswith(_UNPACKED):
        return _plain(said, "bfloat16", {"quant": cell})
    return _plain(said, cell, {"quant": "fp8_block" if _BLOCKS in kernel else ""})


def _plain(
    said: Mapping[str, str], cell: str, facts: Mapping[str, str] | None = None
) -> Circumstances | str:
    if cell not in CELL_DTYPES:
        return f"{said['op_name']} in {cell!r} is unknown here"
    return Circumstances.of(said, CELL_DTYPES[cell], facts or {})


_LANES = ("eager", "graph")


@dataclass(frozen=True, slots=True)
class TableReader:
    """Columns a table must have in addition to the common ones, and how its rows are read.

    `times` are the columns of times.
    """

    columns: tuple[str, ...]
    read: Callable[[PerfTable], Iterator[Points]]
    times: tuple[str, ...] = ("latency",)

    @property
    def required(self) -> tuple[str, ...]:
        """All columns it must have."""
        return (*self.times, *self.columns)


# TensorRT-LLM chooses how it multiplies in NVFP4 by timing the ways it has before it serves; its
# collector calls a layer without that and times the fallback, 23 us for 16 rows of 8,192 by 8,192
# on B200 where other engines' kernels take 12.
# Source: ai-dynamo/aiconfigurator, collector/trtllm/collect_gemm.py (for 1.3.0rc20);
# NVIDIA/TensorRT-LLM, _torch/custom_ops/torch_custom_ops.py (nvfp4_gemm) and autotuner.py.
_UNTUNED = ("trtllm", "nvfp4")


def _describe_gemm(said: Mapping[str, str]) -> Circumstances | str:
    scheme = split_scheme(said["gemm_dtype"])
    if scheme is None:
        return f"gemm_dtype {said['gemm_dtype']!r} is unknown here"
    dtype, quant = scheme
    if (said["framework"].lower(), quant) == _UNTUNED:
        return "products in NVFP4 were timed without the tuning that TensorRT-LLM serves with"
    return Circumstances.of(said, dtype, {"quant": quant})


def _read_gemm(table: PerfTable) -> Iterator[Points]:
    dims = {name: table.integers(name) for name in ("m", "n", "k")}
    yield make_points("gemm", table, table.describe(("gemm_dtype",), _describe_gemm), dims)


def _nccl_describer(library: str) -> Callable[[Mapping[str, str]], Circumstances | str]:
    # The version is the library's, whatever engine's container it was timed in.
    return lambda said: _describe_collective({**said, "framework": library}, said["nccl_dtype"])


def _describe_all_reduce(said: Mapping[str, str]) -> Circumstances | str:
    return _describe_collective(said, said["allreduce_dtype"])


def _describe_collective(said: Mapping[str, str], cell: str) -> Circumstances | str:
    if cell not in CELL_DTYPES or said["op_name"] not in COLLECTIVES:
        return f"{said['op_name']} in {cell!r} is unknown here"
    # `vllm_eager` and `vLLM_custom_eager`: launched one by one, or from a CUDA graph.
    words = (said["backend"], said["implementation"], said["kernel_source"])
    lanes = [lane for lane in _LANES if any(word.endswith(f"_{lane}") for word in words)]
    facts = {"lane": lanes[0] if lanes else ""}
    return Circumstances.of(said, CELL_DTYPES[cell], facts, topology=topology_of(said))


def _collective_reader(
    dtype_column: str, describe: Callable[[Mapping[str, str]], Circumstances | str]
) -> TableReader:
    def read(table: PerfTable) -> Iterator[Points]:
        described = table.describe((dtype_column, "backend", "implementation"), describe)
        cells, cell_names = table.coded(dtype_column)
        sizes = [CELL_DTYPES[name].num_bytes if name in CELL_DTYPES else 1 for name in cell_names]
        element_bytes = np.array(sizes, dtype=np.int64)[cells]
        described, groups = _group_dims(table, described)
        dims = {"message_bytes": table.integers("message_size") * element_bytes, **groups}
        codes, names = table.coded("op_name")
        for code, name in enumerate(names):
            if name in COLLECTIVES:
                rows = described.where(codes == code)
                yield make_points(COLLECTIVES[name], table, rows, dims)

    return TableReader(("op_name", dtype_column, "num_gpus", "message_size"), read)


def _group_dims(table: PerfTable, described: Described) -> tuple[Described, Mapping[str, Integers]]:
    """Return the rows whose ranks fill their nodes evenly, as many on each, and where they are."""
    num_ranks = table.integers("num_gpus")
    node_sizes = [
        find_topology(found.topology or "").devices_per_node for found in described.circumstances
    ]
    per_node = np.ones(table.origin.num_rows, dtype=np.int64)
    per_node[described.rows] = np.array(node_sizes, dtype=np.int64)[described.codes]
    num_nodes = np.maximum(ceil_divide(num_ranks, per_node), 1)
    reason = "num_gpus do not fill their nodes evenly"
    described = table.without(described, num_ranks % num_nodes != 0, reason)
    return described, {"devices_per_node": num_ranks // num_nodes, "num_nodes": num_nodes}


_BATCH = ("batch_size", "isl")
_HEADS = ("num_heads", "num_key_value_heads", "head_dim")
_MODULE = ("model", "mla_dtype", "gemm_type", "num_heads", *_BATCH)
_COMPRESSED = (*_MODULE, "step", "compress_ratio")
_RECURRENT = ("phase", "batch_size", "num_tokens", "d_conv")
_DELTA_HEADS = ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
READERS: Mapping[str, TableReader] = MappingProxyType(
    {
        "gemm_perf": TableReader(("gemm_dtype", "m", "n", "k"), _read_gemm),
        "context_attention_perf": TableReader(("attn_dtype", *_BATCH, *_HEADS), read_prefill),
        "generation_attention_perf": TableReader(
            ("attn_dtype", *_BATCH, "step", *_HEADS), read_decode
        ),
        "context_mla_perf": TableReader(("mla_dtype", *_BATCH), read_mla_prefill),
        "generation_mla_perf": TableReader(("mla_dtype", *_BATCH, "step"), read_mla_decode),
        "mla_context_module_perf": TableReader(_MODULE, read_mla_prefill_module),
        "mla_generation_module_perf": TableReader((*_MODULE, "step"), read_mla_decode_module),
        "dsa_context_module_perf": TableReader(_MODULE, read_dsa_prefill),
        "dsa_generation_module_perf": TableReader((*_MODULE, "step"), read_dsa_decode),
        "dsv4_csa_context_module_perf": TableReader(_COMPRESSED, read_compressed_prefill),
        "dsv4_csa_generation_module_perf": TableReader(_COMPRESSED, read_compressed_decode),
        "dsv4_hca_context_module_perf": TableReader(_COMPRESSED, read_compressed_prefill),
        "dsv4_hca_generation_module_perf": TableReader(_COMPRESSED, read_compressed_decode),
        "msa_context_module_perf": TableReader(_MODULE, read_msa_prefill),
        "msa_generation_module_perf": TableReader((*_MODULE, "step"), read_msa_decode),
        "glm53_attention_module_perf": TableReader(
            ("component", "geometry", "batch_size", "prefix", "x"), read_pooled_attention
        ),
        "gdn_perf": TableReader((*_RECURRENT, *_DELTA_HEADS), read_gated_delta),
        "kda_perf": TableReader((*_RECURRENT, "num_v_heads", "head_v_dim"), read_kda),
        "mamba2_perf": TableReader(
            (*_RECURRENT, "nheads", "head_dim", "n_groups", "d_state"), read_mamba2
        ),
        "mhc_module_perf": TableReader(
            ("num_tokens", "num_sites", "hc_mult", "hidden_size", "sinkhorn_iters"),
            read_hyper_connections,
        ),
        "encoder_attention_perf": TableReader(
            ("attn_dtype", *_BATCH, "num_heads", "head_dim"), read_encoder_attention
        ),
        "mla_bmm_perf": TableReader(
            ("op_name", "bmm_dtype", "num_tokens", "num_heads"), read_latent_products
        ),
        "computescale_perf": TableReader(("op_name", "quant_dtype", "m", "k"), read_quantize),
        "scale_matrix_perf": TableReader(("op_name", "quant_dtype", "m", "k"), read_quantize),
        "moe_perf": TableReader(
            (
                "moe_dtype",
                "num_tokens",
                "hidden_size",
                "inter_size",
                "topk",
                "num_experts",
                "moe_tp_size",
                "moe_ep_size",
                "distribution",
            ),
            read_moe,
        ),
        "nccl_perf": _collective_reader("nccl_dtype", _nccl_describer("nccl")),
        "oneccl_perf": _collective_reader("nccl_dtype", _nccl_describer("oneccl")),
        "custom_allreduce_perf": _collective_reader("allreduce_dtype", _describe_all_reduce),
        "wideep_deepep_ll_perf": TableReader(COLUMNS, read_low_latency_exchange, times=TIMES),
    }
)
