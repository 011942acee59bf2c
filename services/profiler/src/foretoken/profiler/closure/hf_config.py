"""Write the `config.json` of an architecture, for models known by their dimensions alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, MoeSpec
from foretoken.domain.models.hf_config import architecture_of_hf_config

_Content = dict[str, Any]


def config_of_architecture(model: ModelArchitecture) -> _Content:
    """Return the content of a `config.json` that reads back as this architecture, in 16 bits.

    How its checkpoint is stored is left out: what is timed has random weights. So are encoders and
    what predicts further tokens, which do not run. The model type is the first that has all it
    needs; what a type leaves open (epsilons, the base of rotations) is the library's default and
    changes no operator.

    Raises:
        InvalidRequestError: no model type has this combination; give the model's own file.

    """
    for model_type, write in _WRITERS.items():
        try:
            content = {"model_type": model_type, **write(model)}
            read = architecture_of_hf_config(content, model.name)
        except InvalidRequestError:
            continue
        if read == replace(model, aliases=(), quantization="", kv_dtype=None, extras=()):
            return content
    raise InvalidRequestError.of_field(
        "model", f"no model type of transformers is like {model.name}; give its own config.json"
    )


def _decoder(model: ModelArchitecture) -> _Content:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_position,
        "hidden_act": "silu" if model.activation == "silu" else "gelu_pytorch_tanh",
        "tie_word_embeddings": model.has_tied_embedding,
    }


def _llama(model: ModelArchitecture) -> _Content:
    # A bias of queries, keys and values alone is Qwen2's; Llama's is the output's, too.
    if model.has_qkv_bias and not model.has_bias:
        return {}
    biases = {"attention_bias": model.has_qkv_bias, "mlp_bias": model.has_bias}
    return {**_decoder(model), **biases}


def _windowed(model: ModelArchitecture) -> _Content:
    return {**_decoder(model), "sliding_window": model.sliding_window or None}


def _mixtral(model: ModelArchitecture) -> _Content:
    experts = _experts(model)
    return {
        **_windowed(model),
        "intermediate_size": experts.expert_intermediate,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def _qwen2(model: ModelArchitecture) -> _Content:
    # A window is one of all layers: from the first on.
    window = {"max_window_layers": 0} if model.sliding_window else {}
    return {**_windowed(model), "use_sliding_window": bool(window), **window}


def _qwen3(model: ModelArchitecture) -> _Content:
    return {**_qwen2(model), "attention_bias": model.has_qkv_bias}


def _qwen_experts(model: ModelArchitecture) -> _Content:
    experts = _experts(model)
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.expert_intermediate,
        "mlp_only_layers": list(range(experts.num_dense_layers)),
        "decoder_sparse_step": 1,
    }


def _qwen2_moe(model: ModelArchitecture) -> _Content:
    experts = _experts(model)
    width = experts.num_shared_experts * experts.expert_intermediate
    shared = {"shared_expert_intermediate_size": width}
    return {**_qwen2(model), **_qwen_experts(model), **shared}


def _qwen3_moe(model: ModelArchitecture) -> _Content:
    return {**_qwen3(model), **_qwen_experts(model)}


def _gpt_oss(model: ModelArchitecture) -> _Content:
    experts, period = _experts(model), model.full_attention_period
    types = ("full_attention", "sliding_attention")
    return {
        **_windowed(model),
        "attention_bias": model.has_qkv_bias,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "layer_types": [
            types[0] if period and place % period == period - 1 else types[1]
            for place in range(model.num_layers)
        ],
    }


def _deepseek(model: ModelArchitecture) -> _Content:
    experts = _experts(model)
    latent = model.mla
    if latent is None:
        raise InvalidRequestError.of_field("mla", "the model has no latent attention")
    return {
        **_decoder(model),
        "head_dim": latent.qk_rope_head_dim,
        "q_lora_rank": latent.q_lora_rank or None,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.expert_intermediate,
        "n_shared_experts": experts.num_shared_experts,
        "first_k_dense_replace": experts.num_dense_layers,
        "n_group": experts.num_groups or 1,
        "topk_group": experts.top_k_groups or 1,
    }


def _classic(model: ModelArchitecture) -> _Content:
    parallel = {"use_parallel_residual": model.has_parallel_residual}
    return {**_decoder(model), "hidden_act": "gelu", **parallel}


def _phi(model: ModelArchitecture) -> _Content:
    # Only models called so: others of this kind are written as GPT-NeoX.
    is_phi = "phi" in model.name.lower()
    return {**_decoder(model), "hidden_act": "gelu_new"} if is_phi else {}


def _gpt2(model: ModelArchitecture) -> _Content:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden,
        "n_head": model.num_heads,
        "n_inner": model.intermediate,
        "vocab_size": model.vocab,
        "n_positions": model.max_position,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.has_tied_embedding,
    }


def _experts(model: ModelArchitecture) -> MoeSpec:
    if model.moe is None:
        raise InvalidRequestError.of_field("moe", "the model has no experts")
    return model.moe


_WRITERS: Mapping[str, Callable[[ModelArchitecture], _Content]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _windowed,
    "gemma": _decoder,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "phi": _phi,
    "gpt_neox": _classic,
}
