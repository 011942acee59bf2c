"""Hugging Face `config.json` files, without the keys that say nothing about operators."""

from collections.abc import Mapping
from typing import Any


def _llama_like(model_type: str, *sizes: int, **extra: Any) -> dict[str, Any]:
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    config = dict(zip(keys, sizes, strict=True))
    return {"model_type": model_type, "hidden_act": "silu", **config, **extra}


_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}

# By preset: what the repository of the preset holds.
CONFIGS_OF_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _llama_like(
        "llama", 32, 4096, 32, 11008, 32000, 4096, num_key_value_heads=32, rope_scaling=None
    ),
    "llama-3.1-405b": _llama_like(
        "llama",
        *(126, 16384, 128, 53248, 128256, 131072),
        num_key_value_heads=8,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    ),
    "gpt-oss-20b": _llama_like(
        "gpt_oss",
        *(24, 2880, 64, 2880, 201088, 131072),
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
        num_key_value_heads=8,
        head_dim=64,
        attention_bias=True,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
        num_local_experts=32,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
    ),
    "internlm-7b": _llama_like("internlm", 32, 4096, 32, 11008, 103168, 2048, bias=True),
    "internlm-20b": _llama_like(
        "internlm", 60, 5120, 40, 13824, 103168, 4096, bias=False, num_key_value_heads=40
    ),
    "internlm2-7b": _llama_like(
        "internlm2", 32, 4096, 32, 14336, 92544, 32768, bias=False, num_key_value_heads=8
    ),
    "qwen-72b": _llama_like(
        "qwen", 80, 8192, 64, 49152, 152064, 32768, kv_channels=128, no_bias=True, seq_length=32768
    ),
    "qwen2-7b": _llama_like(
        "qwen2",
        *(28, 3584, 28, 18944, 152064, 131072),
        num_key_value_heads=4,
        sliding_window=131072,
        use_sliding_window=False,
        tie_word_embeddings=False,
    ),
    "qwen2.5-0.5b": _llama_like(
        "qwen2",
        *(24, 896, 14, 4864, 151936, 32768),
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _llama_like(
        "qwen3",
        *(36, 4096, 32, 12288, 151936, 40960),
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=False,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": _llama_like(
        "qwen3_moe",
        *(48, 2048, 32, 6144, 151936, 40960),
        **_QWEN_MOE,
        num_key_value_heads=4,
        head_dim=128,
        attention_bias=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "mixtral-8x7b": _llama_like(
        "mixtral",
        *(32, 4096, 32, 14336, 32000, 32768),
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "deepseek-v3": _llama_like(
        "deepseek_v3",
        *(61, 7168, 128, 18432, 129280, 163840),
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        num_key_value_heads=128,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "phi-2": {
        **_llama_like("phi", 32, 2560, 32, 10240, 51200, 2048),
        "hidden_act": "gelu_new",
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    },
    "gpt-neox-20b": {
        **_llama_like("gpt_neox", 44, 6144, 64, 24576, 50432, 2048),
        "hidden_act": "gelu_fast",
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "n_ctx": 1024,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
}

# By name: a model without a preset, and its published parameters.
CONFIGS_OF_OTHERS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "Mistral-7B-v0.1": (
        _llama_like(
            "mistral",
            *(32, 4096, 32, 14336, 32000, 32768),
            num_key_value_heads=8,
            sliding_window=4096,
        ),
        7_241_732_096,
    ),
    "gemma-2b": (
        {
            **_llama_like("gemma", 18, 2048, 8, 16384, 256000, 8192),
            "hidden_act": "gelu",
            "hidden_activation": None,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
        2_506_172_416,
    ),
    "Qwen1.5-MoE-A2.7B": (
        _llama_like(
            "qwen2_moe",
            *(24, 2048, 16, 5632, 151936, 8192),
            **_QWEN_MOE,
            num_key_value_heads=16,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
    "DeepSeek-V2-Lite": (
        _llama_like(
            "deepseek_v2",
            *(27, 2048, 16, 10944, 102400, 163840),
            num_key_value_heads=16,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            moe_layer_freq=1,
            first_k_dense_replace=1,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        15_706_484_224,
    ),
}
