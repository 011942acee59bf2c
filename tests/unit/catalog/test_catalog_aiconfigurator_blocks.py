"""AIConfigurator's tables of sparse and linear attention and of the kernels around them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiconfigurator_tables import plan_rows, read_plan, write_table

_MODULE = {
    "mla_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "gemm_type": "fp8_block",
    "num_heads": 32,
    "batch_size": 2,
    "isl": 8,
    "tp_size": 4,
    "step": 0,
}
_DSA = {**_MODULE, "op_name": "dsa_context_module", "model": "deepseek-ai/DeepSeek-V3.2"}
_V4 = {**_MODULE, "model": "sgl-project/DeepSeek-V4-Pro-FP8", "kv_cache_dtype": "fp8_e4m3"}
_MSA = {**_MODULE, "model": "MiniMaxAI/MiniMax-M3"}
_LATENT = {
    "num_heads": 32,
    "hidden": 7168,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_num_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_COMPRESSED = {
    "window": 128,
    "num_heads": 32,
    "hidden": 7168,
    "q_lora_rank": 1536,
    "head_dim": 512,
    "o_groups": 4,
    "o_lora_rank": 1024,
}
_INDEXED = {"index_num_heads": 64, "index_head_dim": 128, "index_topk": 1024}
_NOT_INDEXED = {"index_num_heads": 0, "index_head_dim": 0, "index_topk": 0}
_BLOCKS = {
    "num_heads": 32,
    "num_kv_heads": 2,
    "head_dim": 128,
    "hidden": 6144,
    "index_num_heads": 2,
    "index_head_dim": 128,
    "block_size": 128,
    "topk_blocks": 16,
}
_GDN = {
    "phase": "context",
    "batch_size": 2,
    "seq_len": 8,
    "num_tokens": 16,
    "d_model": 4096,
    "d_conv": 4,
    "num_k_heads": 16,
    "head_k_dim": 128,
    "num_v_heads": 32,
    "head_v_dim": 128,
    "model_name": "Qwen/Qwen3.5-9B",
}
_KDA = {**_GDN, "num_k_heads": 12, "num_v_heads": 12, "model_name": "moonshotai/Kimi-K3"}
_MAMBA = {
    "phase": "generation",
    "batch_size": 2,
    "num_tokens": 2,
    "d_model": 4096,
    "d_state": 128,
    "d_conv": 4,
    "nheads": 64,
    "head_dim": 64,
    "n_groups": 8,
    "chunk_size": 256,
}
_MHC = {
    "op_name": "pre",
    "num_tokens": 16,
    "num_sites": 2,
    "hc_mult": 4,
    "hidden_size": 7168,
    "sinkhorn_iters": 20,
}
_BMM = {"op_name": "mla_gen_pre", "bmm_dtype": "bfloat16", "num_tokens": 16, "num_heads": 32}
_SCALE = {"op_name": "compute_scale", "quant_dtype": "fp8", "m": 16, "k": 4096}
_ENCODER = {
    "batch_size": 2,
    "isl": 8,
    "num_heads": 16,
    "head_dim": 72,
    "attn_dtype": "bfloat16",
}
_TOKENS = {"num_seqs": 2, "num_tokens": 16}
_GEOMETRY = {
    "backend": "sglang",
    "checkpoint_format": "fp8",
    "head_dim": 256,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_pool": 4,
    "index_topk": 2048,
    "is_context": True,
    "kv_cache_dtype": "fp8",
    "kv_lora_rank": 512,
    "layer_kind": "sparse_mla",
    "num_heads": 16,
    "projection_quant_mode": "fp8_block",
    "q_lora_rank": 1536,
    "value_head_dim": 256,
}
_POOLED = {
    "num_heads": 16,
    "hidden": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_pool": 4,
}


def _glm(**geometry: Any) -> dict[str, Any]:
    said = json.dumps({**_GEOMETRY, **geometry})
    return {"component": "attention", "geometry": said, "batch_size": 2, "prefix": 2045, "x": 8}


_DELTA = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}


def _row(root: Path, table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = plan_rows(read_plan(write_table(root / f"{table}.parquet", row)))
    return found


@pytest.mark.parametrize(
    ("table", "row", "operator", "dims"),
    [
        (
            # After 2045 tokens the first three of eight see 2046 to 2048 tokens, the others 2048.
            "dsa_context_module_perf",
            {**_DSA, "step": 2045},
            "dsa_prefill_module",
            {
                "num_seqs": 2,
                "q_tokens": 16,
                "kv_tokens": 2 * 2053,
                "score_pairs": 2 * (8 * 2045 + 36),
                "selected_pairs": 2 * (2046 + 2047 + 6 * 2048),
                **_LATENT,
            },
        ),
        (
            "glm53_attention_module_perf",
            _glm(),
            "pooled_attention_prefill_module",
            {
                "num_seqs": 2,
                "q_tokens": 16,
                "kv_tokens": 2 * 2053,
                "score_pairs": 2 * (8 * 2045 + 36),
                "selected_pairs": 2 * (2046 + 2047 + 6 * 2048),
                **_POOLED,
            },
        ),
        (
            # A token after 4095 others.
            "glm53_attention_module_perf",
            {**_glm(is_context=False), "prefix": 0, "x": 4095},
            "pooled_attention_decode_module",
            {
                "num_seqs": 2,
                "kv_tokens": 8192,
                "kv_tokens_max": 4096,
                "selected_tokens": 4096,
                **_POOLED,
            },
        ),
        (
            "dsa_generation_module_perf",
            {**_DSA, "op_name": "dsa_generation_module_skip_indexer", "isl": 1, "step": 4095},
            "dsa_decode_module",
            {
                "num_seqs": 2,
                "kv_tokens": 8192,
                "kv_tokens_max": 4096,
                "selected_tokens": 4096,
                **_LATENT,
                "index_num_heads": 0,
                "index_head_dim": 0,
            },
        ),
        (
            # Positions 4095 to 4102 have 1023 entries once, then 1024 four times and 1025.
            "dsv4_csa_context_module_perf",
            {**_V4, "step": 4094, "compress_ratio": 4},
            "compressed_attention_prefill_module",
            {
                "num_seqs": 2,
                "q_tokens": 16,
                "kv_tokens": 2 * 4102,
                "num_entries": 2 * 1025,
                "window_pairs": 2 * 8 * 128,
                "entry_pairs": 2 * (1023 + 4 * 1024 + 3 * 1025),
                "selected_pairs": 2 * (1023 + 7 * 1024),
                "compress_ratio": 4,
                **_COMPRESSED,
                **_INDEXED,
            },
        ),
        (
            "dsv4_hca_generation_module_perf",
            {**_V4, "isl": 1, "step": 1023, "compress_ratio": 128},
            "compressed_attention_decode_module",
            {
                "num_seqs": 2,
                "kv_tokens": 2048,
                "kv_tokens_max": 1024,
                "num_entries": 16,
                "window_tokens": 256,
                "selected_entries": 16,
                "compress_ratio": 128,
                **_COMPRESSED,
                **_NOT_INDEXED,
            },
        ),
        (
            "msa_context_module_perf",
            _MSA,
            "msa_prefill_module",
            {
                "num_seqs": 2,
                "q_tokens": 16,
                "kv_tokens": 16,
                "score_pairs": 72,
                "selected_pairs": 72,
                **_BLOCKS,
            },
        ),
        (
            # TensorRT-LLM has all heads of the indexer on every rank.
            "msa_generation_module_perf",
            {**_MSA, "isl": 1, "step": 4095, "framework": "TRTLLM", "num_heads": 8},
            "msa_decode_module",
            {
                "num_seqs": 2,
                "kv_tokens": 8192,
                "kv_tokens_max": 4096,
                "selected_tokens": 4096,
                **_BLOCKS,
                "num_heads": 8,
                "num_kv_heads": 1,
                "index_num_heads": 4,
            },
        ),
        (
            "gdn_perf",
            {**_GDN, "kernel_source": "chunk_gated_delta_rule"},
            "gated_delta_prefill",
            {**_TOKENS, **_DELTA},
        ),
        (
            "gdn_perf",
            {**_GDN, "kernel_source": "causal_conv1d_fn"},
            "causal_conv_prefill",
            {**_TOKENS, "channels": 2 * 2048 + 4096, "kernel_size": 4},
        ),
        (
            "gdn_perf",
            {**_GDN, "kernel_source": "causal_conv1d_fn", "framework": "TRTLLM"},
            "causal_conv_prefill",
            {**_TOKENS, "channels": 2048, "kernel_size": 4},
        ),
        (
            "kda_perf",
            {**_KDA, "kernel_source": "fused_recurrent_kda", "phase": "verify"},
            "kda_decode",
            {**_TOKENS, "num_heads": 12, "head_dim": 128},
        ),
        (
            "kda_perf",
            {**_KDA, "kernel_source": "causal_conv1d_fn_qkv3"},
            "causal_conv_prefill",
            {**_TOKENS, "channels": 3 * 1536, "kernel_size": 4},
        ),
        (
            "mamba2_perf",
            {**_MAMBA, "kernel_source": "selective_state_update"},
            "mamba2_decode",
            {
                "num_seqs": 2,
                "num_tokens": 2,
                "num_heads": 64,
                "head_dim": 64,
                "num_groups": 8,
                "state_dim": 128,
            },
        ),
        (
            "mamba2_perf",
            {**_MAMBA, "kernel_source": "causal_conv1d_update"},
            "causal_conv_decode",
            {"num_seqs": 2, "num_tokens": 2, "channels": 4096 + 2 * 1024, "kernel_size": 4},
        ),
        (
            "mla_bmm_perf",
            _BMM,
            "batched_gemm",
            {"batch": 32, "m": 16, "n": 512, "k": 128},
        ),
        (
            "mla_bmm_perf",
            {**_BMM, "op_name": "mla_gen_post"},
            "batched_gemm",
            {"batch": 32, "m": 16, "n": 128, "k": 512},
        ),
        ("computescale_perf", _SCALE, "quantize", {"num_tokens": 16, "hidden": 4096}),
        (
            "encoder_attention_perf",
            _ENCODER,
            "encoder_attention",
            {**_TOKENS, "score_pairs": 128, "num_heads": 16, "head_dim": 72},
        ),
    ],
)
def test_a_row_is_the_operator_it_measured(
    tmp_path: Path, table: str, row: Mapping[str, Any], operator: str, dims: Mapping[str, int]
) -> None:
    """Heads are those of the rank; what the table leaves out is what the model has published."""
    found = _row(tmp_path, table, {**row, "latency": 0.25})
    assert (operator, dims, 250.0) == (found["operator"], found["dims"], found["latency_us_median"])


def test_a_row_of_hyper_connections_has_the_time_of_its_sites(tmp_path: Path) -> None:
    """One after the other, before the attention and before the experts."""
    sizes = {"num_tokens": 16, "num_streams": 4, "hidden": 7168}
    expected = ("mhc_pre", {**sizes, "sinkhorn_steps": 20}, 125.0)
    found = _row(tmp_path, "mhc_module_perf", {**_MHC, "latency": 0.25})
    assert expected == (found["operator"], found["dims"], found["latency_us_median"])
    found = _row(tmp_path, "mhc_module_perf", {**_MHC, "op_name": "post"})
    assert ("mhc_post", sizes) == (found["operator"], found["dims"])


@pytest.mark.parametrize(
    ("table", "row", "dtype", "variant"),
    [
        ("dsa_context_module_perf", _DSA, "fp8", "attn=bf16;kv=fp8;quant=fp8_block"),
        ("dsa_context_module_perf", {**_DSA, "gemm_type": "bfloat16"}, "bf16", "kv=fp8"),
        ("glm53_attention_module_perf", _glm(), "fp8", "attn=bf16;kv=fp8;quant=fp8_block"),
        (
            "glm53_attention_module_perf",
            _glm(projection_quant_mode="bfloat16", kv_cache_dtype="bfloat16"),
            "bf16",
            None,
        ),
        ("kda_perf", {**_KDA, "kernel_source": "kda_fused_decode"}, "bf16", "scope=conv"),
        ("kda_perf", {**_KDA, "kernel_source": "causal_conv1d_fn_qkv3"}, "bf16", "calls=3"),
        ("kda_perf", {**_KDA, "phase": "verify"}, "bf16", "step=verify"),
        ("mla_bmm_perf", {**_BMM, "bmm_dtype": "fp8"}, "fp8", None),
        (
            # The weights are bf16 by then.
            "mla_bmm_perf",
            {**_BMM, "bmm_dtype": "fp8", "kernel_source": "trtllm_bmm_out_dequant_bf16"},
            "bf16",
            "quant=fp8",
        ),
        (
            "mla_bmm_perf",
            {**_BMM, "bmm_dtype": "fp8", "kernel_source": "trtllm_fp8_block_scaling_bmm_out"},
            "fp8",
            "quant=fp8_block",
        ),
        ("computescale_perf", _SCALE, "fp8", "part=scale"),
        ("scale_matrix_perf", {**_SCALE, "op_name": "scale_matrix"}, "fp8", "part=convert"),
    ],
)
def test_what_the_dimensions_leave_open_is_kept_apart(
    tmp_path: Path, table: str, row: Mapping[str, Any], dtype: str, variant: str | None
) -> None:
    found = _row(tmp_path, table, row)
    assert (dtype, variant) == (found["dtype"], found["variant"])


@pytest.mark.parametrize(
    ("table", "row", "note"),
    [
        (
            "dsa_context_module_perf",
            {**_DSA, "model": "a/b"},
            "dsa_prefill_module: the sizes of 'a/b' are unknown here",
        ),
        (
            "dsa_context_module_perf",
            {**_DSA, "gemm_type": "awq"},
            "gemm_type 'awq' with 'bfloat16' is unknown here",
        ),
        (
            "glm53_attention_module_perf",
            {**_glm(), "component": "mhc"},
            "'mhc' of GLM-5.3-Flash is unknown here",
        ),
        ("gdn_perf", {**_GDN, "phase": "draft"}, "phase 'draft' is unknown here"),
        ("mhc_module_perf", {**_MHC, "op_name": "mid"}, "'mid' of mHC is unknown here"),
        (
            "mla_bmm_perf",
            {**_BMM, "op_name": "mla_gen"},
            "'mla_gen' of latent attention is unknown here",
        ),
        ("computescale_perf", {**_SCALE, "op_name": "round"}, "'round' is unknown here"),
        (
            "encoder_attention_perf",
            {**_ENCODER, "attn_dtype": "fp6"},
            "op in 'fp6' is unknown here",
        ),
    ],
)
def test_rows_of_unknown_kinds_are_noted(
    tmp_path: Path, table: str, row: Mapping[str, Any], note: str
) -> None:
    """The row next to them is read."""
    known = {**row, **{name: _KNOWN[name] for name in _KNOWN.keys() & row.keys()}}
    known |= {"op_name": {"mhc_module_perf": "pre", "mla_bmm_perf": "mla_gen_pre"}.get(table, "")}
    if table == "computescale_perf":
        known["op_name"] = "compute_scale"
    plan = read_plan(write_table(tmp_path / f"{table}.parquet", row, known))
    assert [2] == [found["source_row"] for found in plan_rows(plan)]
    assert (f"{table}.parquet: 1 rows are not read: {note}",) == plan.notes


_KNOWN = {
    "component": "attention",
    "model": "zai-org/GLM-5-FP8",
    "gemm_type": "nvfp4",
    "phase": "context",
    "attn_dtype": "bfloat16",
}


def test_a_checkpoint_in_another_format_has_the_same_sizes(tmp_path: Path) -> None:
    names = ("zai-org/GLM-5", "zai-org/GLM-5-FP8", "nvidia/GLM-5.2-NVFP4")
    rows = [{**_DSA, "model": name} for name in names]
    path = write_table(tmp_path / "dsa_context_module_perf.parquet", *rows)
    found = [row["dims"] for row in plan_rows(read_plan(path))]
    assert 3 * [(6144, 32, 192)] == [
        (dims["hidden"], dims["index_num_heads"], dims["qk_nope_head_dim"]) for dims in found
    ]
