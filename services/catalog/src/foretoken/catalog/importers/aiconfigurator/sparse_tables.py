"""The tables of whole sparse attention blocks: DSA, DeepSeek-V4's CSA and HCA, MiniMax's MSA.

A row of a context table has `isl` new tokens after `step` cached ones in each sequence, one of a
generation table `isl` + `step` tokens of context. `num_heads` are those of a rank; what else a rank
has a share of follows from them, the indexer's heads of DSA and CSA are whole on every rank.
Source: collector/{sglang,trtllm,vllm}/collect_{mla,dsv4_attn,msa}_module.py.

Sizes that tables leave out are those of published models: `config.json` of the checkpoints on
Hugging Face, deepseek-ai/DeepSeek-V3.2, deepseek-ai/DeepSeek-V4-Flash and -V4-Pro, zai-org/GLM-5
and -5.2, MiniMaxAI/MiniMax-M3. The same checkpoint stored in another format has the same sizes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from foretoken.catalog.dims import Integers
from foretoken.catalog.importers.aiconfigurator.attention_tables import (
    circumstances_of_attention,
    decode_columns,
)
from foretoken.catalog.importers.aiconfigurator.formats import CELL_DTYPES, split_scheme
from foretoken.catalog.importers.aiconfigurator.perf_table import Circumstances, PerfTable
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.catalog.importing import name_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.visible_pairs import block_pairs, limited_pairs
from foretoken.domain.units import smaller

Sizes = Mapping[str, int]

# What the names of checkpoints end in that are stored in another format.
_STORED = re.compile(r"-(FP8|NVFP4)$", re.IGNORECASE)

_GLM_5 = {
    "num_heads": 64,
    "hidden": 6144,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
# Latent attention whose indexer selects tokens (DSA).
DSA_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "deepseek-v3.2": {
            "num_heads": 128,
            "hidden": 7168,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "index_num_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        "glm-5": _GLM_5,
        "glm-5.1": _GLM_5,
        "glm-5.2": _GLM_5,
    }
)
# Compressed attention, with the indexer of its layers of ratio 4 (CSA).
COMPRESSED_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "deepseek-v4-flash": {
            "num_heads": 64,
            "hidden": 4096,
            "q_lora_rank": 1024,
            "head_dim": 512,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "window": 128,
            "index_num_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
        },
        "deepseek-v4-pro": {
            "num_heads": 128,
            "hidden": 7168,
            "q_lora_rank": 1536,
            "head_dim": 512,
            "o_groups": 16,
            "o_lora_rank": 1024,
            "window": 128,
            "index_num_heads": 64,
            "index_head_dim": 128,
            "index_topk": 1024,
        },
    }
)
# Grouped-query attention whose indexer selects blocks (MSA).
MSA_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "minimax-m3": {
            "num_heads": 64,
            "num_kv_heads": 4,
            "head_dim": 128,
            "hidden": 6144,
            "index_num_heads": 4,
            "index_head_dim": 128,
            "block_size": 128,
            "topk_blocks": 16,
        }
    }
)


def find_sizes(known: Mapping[str, Sizes], checkpoint: str) -> Sizes | None:
    """Return the sizes of a checkpoint by its name on Hugging Face; None if it is not known."""
    name = _STORED.sub("", checkpoint.rpartition("/")[2])
    return known.get(name.lower())


Dims: TypeAlias = Mapping[str, Integers | int]
# What a block's rows are, from a table and the sizes of its model.
DimsOfModel: TypeAlias = Callable[[PerfTable, Sizes], Dims]

# What the name of an operation ends in whose layer sees what another layer's indexer chose.
_NO_INDEXER = "_skip_indexer"


def module_reader(
    operator: str, known: Mapping[str, Sizes], dims_of: DimsOfModel
) -> Callable[[PerfTable], Iterator[Points]]:
    """Return a reader of a table of blocks whose models have these sizes."""

    def describe(said: Mapping[str, str]) -> Circumstances | str:
        scheme, attention = split_scheme(said["gemm_type"]), CELL_DTYPES.get(said["mla_dtype"])
        if scheme is None or attention is None:
            return f"gemm_type {said['gemm_type']!r} with {said['mla_dtype']!r} is unknown here"
        if find_sizes(known, said["model"]) is None:
            return f"{operator}: the sizes of {said['model']!r} are unknown here"
        dtype, quant = scheme
        facts = {"quant": quant, "attn": "" if attention is dtype else attention.name.lower()}
        model = name_model(said["model"])
        return circumstances_of_attention(said, said["mla_dtype"], facts, dtype=dtype, model=model)

    def read(table: PerfTable) -> Iterator[Points]:
        columns = ("mla_dtype", "kv_cache_dtype", "gemm_type", "model")
        described = table.describe(columns, describe)
        codes, names = table.coded("model")
        for code, name in enumerate(names):
            rows, sizes = described.where(codes == code), find_sizes(known, name)
            if len(rows.rows) and sizes is not None:
                yield make_points(operator, table, rows, dims_of(table, sizes))

    return read


def _dsa_prefill(table: PerfTable, sizes: Sizes) -> Dims:
    num_seqs, q_len, cached = _prefill_columns(table)
    selected = num_seqs * limited_pairs(q_len, cached, sizes["index_topk"])
    return {
        **prefill_dims(num_seqs, q_len, cached),
        "selected_pairs": selected,
        **_dsa_sizes(table, sizes),
    }


def _dsa_decode(table: PerfTable, sizes: Sizes) -> Dims:
    batch = decode_columns(table)
    selected = batch["num_seqs"] * smaller(batch["kv_tokens_max"], sizes["index_topk"])
    return {**batch, "selected_tokens": selected, **_dsa_sizes(table, sizes)}


def _dsa_sizes(table: PerfTable, sizes: Sizes) -> Dims:
    codes, names = table.coded("op_name")
    has_indexer = np.array([not name.endswith(_NO_INDEXER) for name in names])[codes]
    return {
        **sizes,
        "num_heads": table.integers("num_heads"),
        **{
            name: np.where(has_indexer, sizes[name], 0)
            for name in ("index_num_heads", "index_head_dim")
        },
    }


def _compressed_prefill(table: PerfTable, sizes: Sizes) -> Dims:
    num_seqs, q_len, cached = _prefill_columns(table)
    ratio = np.maximum(table.integers("compress_ratio"), 1)
    num_entries = (cached + q_len) // ratio
    seen = _compressed_sizes(table, sizes)
    limit = np.where(seen["index_topk"] > 0, seen["index_topk"], num_entries)
    return {
        "num_seqs": num_seqs,
        "q_tokens": num_seqs * q_len,
        "kv_tokens": num_seqs * (cached + q_len),
        "num_entries": num_seqs * num_entries,
        "window_pairs": num_seqs * limited_pairs(q_len, cached, sizes["window"]),
        "entry_pairs": num_seqs * block_pairs(q_len, cached, ratio, num_entries),
        "selected_pairs": num_seqs * block_pairs(q_len, cached, ratio, limit),
        **seen,
    }


def _compressed_decode(table: PerfTable, sizes: Sizes) -> Dims:
    batch = decode_columns(table)
    num_seqs, kv_len = batch["num_seqs"], batch["kv_tokens_max"]
    num_entries = kv_len // np.maximum(table.integers("compress_ratio"), 1)
    seen = _compressed_sizes(table, sizes)
    limit = np.where(seen["index_topk"] > 0, seen["index_topk"], num_entries)
    return {
        **batch,
        "num_entries": num_seqs * num_entries,
        "window_tokens": num_seqs * smaller(kv_len, sizes["window"]),
        "selected_entries": num_seqs * smaller(num_entries, limit),
        **seen,
    }


def _compressed_sizes(table: PerfTable, sizes: Sizes) -> dict[str, Integers | int]:
    num_heads, ratio = table.integers("num_heads"), table.integers("compress_ratio")
    # Only where an indexer chooses among them are entries as fine as this.
    has_indexer = ratio == _INDEXED_RATIO
    return {
        **sizes,
        "compress_ratio": ratio,
        "num_heads": num_heads,
        "o_groups": np.maximum(sizes["o_groups"] * num_heads // sizes["num_heads"], 1),
        **{
            name: np.where(has_indexer, sizes[name], 0)
            for name in ("index_num_heads", "index_head_dim", "index_topk")
        },
    }


def _msa_prefill(table: PerfTable, sizes: Sizes) -> Dims:
    num_seqs, q_len, cached = _prefill_columns(table)
    limit = sizes["topk_blocks"] * sizes["block_size"]
    return {
        **prefill_dims(num_seqs, q_len, cached),
        "selected_pairs": num_seqs * limited_pairs(q_len, cached, limit),
        **_msa_sizes(table, sizes),
    }


def _msa_decode(table: PerfTable, sizes: Sizes) -> Dims:
    batch = decode_columns(table)
    limit = sizes["topk_blocks"] * sizes["block_size"]
    selected = batch["num_seqs"] * smaller(batch["kv_tokens_max"], limit)
    return {**batch, "selected_tokens": selected, **_msa_sizes(table, sizes)}


def _msa_sizes(table: PerfTable, sizes: Sizes) -> Dims:
    num_heads = table.integers("num_heads")
    num_kv_heads = np.maximum(sizes["num_kv_heads"] * num_heads // sizes["num_heads"], 1)
    # A head of the indexer goes with each key head; TensorRT-LLM has all of them on every rank.
    codes, names = table.coded("framework")
    has_all = np.array([name.lower() == "trtllm" for name in names])[codes]
    return {
        **sizes,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "index_num_heads": np.where(has_all, sizes["index_num_heads"], num_kv_heads),
    }


def _prefill_columns(table: PerfTable) -> tuple[Integers, Integers, Integers]:
    """Return sequences, new tokens of each and cached tokens of each."""
    return table.integers("batch_size"), table.integers("isl"), table.integers("step", 0)


# Source: `compress_ratios` of DeepSeek-V4's configuration; its layers of ratio 4 have the indexer.
_INDEXED_RATIO = 4

read_dsa_prefill = module_reader("dsa_prefill_module", DSA_SIZES, _dsa_prefill)
read_dsa_decode = module_reader("dsa_decode_module", DSA_SIZES, _dsa_decode)
read_compressed_prefill = module_reader(
    "compressed_attention_prefill_module", COMPRESSED_SIZES, _compressed_prefill
)
read_compressed_decode = module_reader(
    "compressed_attention_decode_module", COMPRESSED_SIZES, _compressed_decode
)
read_msa_prefill = module_reader("msa_prefill_module", MSA_SIZES, _msa_prefill)
read_msa_decode = module_reader("msa_decode_module", MSA_SIZES, _msa_decode)
