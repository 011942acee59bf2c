"""Names in AIConfigurator's tables, and what they are called here.

Source: https://github.com/ai-dynamo/aiconfigurator, the collectors and `sdk/common.py`.
"""

from types import MappingProxyType

from foretoken.domain.measurements.estimate import DType

# The engines whose versions name folders.
ENGINES = ("trtllm", "vllm", "sglang")
# Libraries that measure collectives without an engine.
LIBRARIES = ("nccl", "oneccl")

# Table (the file's name without suffix) by its folder under `data/<system>/`.
FAMILIES = MappingProxyType(
    {
        "gemm_perf": "gemm",
        "context_attention_perf": "attention",
        "generation_attention_perf": "attention",
        "context_mla_perf": "mla",
        "generation_mla_perf": "mla",
        "mla_context_module_perf": "mla",
        "mla_generation_module_perf": "mla",
        "moe_perf": "moe",
        "nccl_perf": "comm",
        "oneccl_perf": "comm",
        "custom_allreduce_perf": "comm",
    }
)

# Cells of caches, attention and messages.
CELL_DTYPES = MappingProxyType(
    {
        "bfloat16": DType.BF16,
        "float16": DType.FP16,
        "half": DType.FP16,
        "float": DType.FP32,
        "fp8": DType.FP8,
        "fp8_e4m3": DType.FP8,
        "int8": DType.INT8,
    }
)

# Cells of matrix products: the activations' format, and whether the name says more than that.
# `wo` is weight-only, `wXaY` has X-bit weights and Y-bit activations, `sq` is SmoothQuant.
_SCHEMES = MappingProxyType(
    {
        "bfloat16": DType.BF16,
        "float16": DType.FP16,
        "fp8": DType.FP8,
        "fp8_block": DType.FP8,
        "fp8_ootb": DType.FP8,
        "fp8_static": DType.FP8,
        "int8_wo": DType.BF16,
        "int4_wo": DType.BF16,
        "sq": DType.INT8,
        "nvfp4": DType.FP4,
        "nvfp4_wo": DType.BF16,
        "w4a16_nvfp4": DType.BF16,
        "w4a16_mxfp4": DType.BF16,
        "w4a16_mxfp4_cutlass": DType.BF16,
        "w4a8_mxfp4_mxfp8": DType.FP8,
        "w4a8_mxfp4_mxfp8_trtllm": DType.FP8,
        "w4afp8": DType.FP8,
    }
)
_PLAIN = {"bfloat16", "float16", "fp8"}

COLLECTIVES = MappingProxyType(
    {
        "all_reduce": "all_reduce",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "alltoall": "all_to_all",
    }
)

# Latent attention's sizes, which the tables of the attention alone leave out: DeepSeek-V3's.
# Source: the constants of collector/trtllm/collect_mla.py and collector/vllm/collect_mla.py.
MLA_HEAD_DIMS = MappingProxyType(
    {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
MLA_LATENT_DIMS = MappingProxyType({"kv_lora_rank": 512, "qk_rope_head_dim": 64})


def split_scheme(name: str) -> tuple[DType, str] | None:
    """Return the activations' format and the `quant` of a variant; None for an unknown name."""
    dtype = _SCHEMES.get(name)
    if dtype is None:
        return None
    return dtype, "" if name in _PLAIN else name


def name_scheme(dtype: str, quant: str) -> str | None:
    """Return the name of a scheme, from the `dtype` and `quant` of a row; None if it has none.

    Half precision is one lane there, called `bfloat16`.
    """
    if quant:
        found = _SCHEMES.get(quant)
        return quant if found is not None and found.name.lower() == dtype else None
    return {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}.get(dtype)


def name_cell(dtype: str) -> str | None:
    """Return the name of a cache's or attention's format; None if it has none."""
    return {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8", "int8": "int8"}.get(dtype)
