"""Hugging Face files of models whose layers are alike, or dense before and expert after some layer.

Each model type is one function of `DECODERS` that says which keys it has and what they mean.
"""

from collections.abc import Callable, Mapping

from foretoken.domain.models.architecture import MlaSpec, MoeSpec
from foretoken.domain.models.hf_parts import Fields, prediction_heads, read_groups, read_trunk
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart

_LENGTH = "max_position_embeddings"
# What Qwen2Config of transformers takes where its keys are missing.
_QWEN_WINDOW, _QWEN_WINDOW_LAYERS = 4096, 28


def read_decoder(reader: ConfigReader, times_wider: int = 0) -> Fields:
    """Read the keys that Llama and most of its descendants share.

    `times_wider` its dense halves are than the model where a file does not say how wide.
    """
    hidden, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden % num_heads and reader.get("head_dim") is None:
        reader.refuse("hidden_size", f"{hidden} is no multiple of the {num_heads} heads")
    return {
        **read_trunk(reader),
        "num_layers": reader.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": reader.optional("num_key_value_heads", num_heads),
        "head_dim": reader.optional("head_dim", hidden // num_heads),
        "intermediate": reader.optional("intermediate_size", times_wider * hidden)
        if times_wider
        else reader.integer("intermediate_size"),
    }


def _llama(reader: ConfigReader) -> Fields:
    has_bias = reader.flag("mlp_bias", default=False)
    has_attention_bias = reader.flag("attention_bias", default=False)
    fields = {**read_decoder(reader), "has_bias": has_bias, "has_qkv_bias": has_attention_bias}
    return {**fields, **_draft_head(reader)} if reader.has("draft_vocab_size") else fields


def _draft_head(reader: ConfigReader) -> Fields:
    """Return what makes a head of EAGLE-3 of a layer: fewer tokens, and features it is given.

    Source: SGLang and vLLM, models/llama_eagle3.py.
    """
    reader.require("num_hidden_layers", default=1, allowed=1)
    reader.ignore("tie_word_embeddings", "eagle_config", "norm_before_residual", "norm_before_fc")
    hidden = reader.integer("hidden_size")
    dims = {"target_hidden": reader.optional("target_hidden_size", hidden)}
    return {
        "vocab": reader.integer("draft_vocab_size"),
        "has_tied_embedding": True,
        "extras": (LayerPart(kind="draft_inputs", dims=dims),),
    }


def _mistral(reader: ConfigReader) -> Fields:
    return {**read_decoder(reader), "sliding_window": reader.optional("sliding_window", 0)}


def _mixtral(reader: ConfigReader) -> Fields:
    moe = MoeSpec(
        num_experts=reader.integer("num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        expert_intermediate=reader.integer("intermediate_size"),
    )
    return {**_mistral(reader), "moe": moe}


def _qwen(reader: ConfigReader) -> Fields:
    fields = read_decoder(reader)
    # The first Qwen counts gate and up projection together.
    return {
        **fields,
        "intermediate": fields["intermediate"] // 2,
        "head_dim": reader.optional("kv_channels", fields["head_dim"]),
        "has_qkv_bias": True,
    }


def _qwen2(reader: ConfigReader) -> Fields:
    fields = read_decoder(reader)
    # Qwen2 has it whatever the key says.
    reader.get("attention_bias")
    return {**fields, "has_qkv_bias": True, **_qwen_window(reader, fields["num_layers"])}


def _qwen_window(reader: ConfigReader, num_layers: int) -> Fields:
    """Return what layers see through a window, and which see all tokens.

    Source: transformers, Qwen2Config: `layer_types`, or a window from layer `max_window_layers` on.
    """
    if not reader.flag("use_sliding_window", default=False):
        return {}
    window = reader.optional("sliding_window", _QWEN_WINDOW)
    if types := reader.texts("layer_types"):
        if "sliding_attention" not in types:
            return {}
        period = _layer_period(reader, num_layers)
        return {"sliding_window": window, "full_attention_period": period}
    first = reader.optional("max_window_layers", _QWEN_WINDOW_LAYERS)
    if first >= num_layers:
        return {}
    if first > 0:
        reader.refuse("max_window_layers", f"a window from layer {first} on cannot be simulated")
    return {"sliding_window": window}


def _qwen2_moe(reader: ConfigReader) -> Fields:
    shared_width = reader.integer("shared_expert_intermediate_size")
    expert_width = reader.integer("moe_intermediate_size")
    if shared_width % expert_width:
        reader.refuse(
            "shared_expert_intermediate_size", "must be a multiple of moe_intermediate_size"
        )
    moe = _qwen_experts(reader, num_shared_experts=shared_width // expert_width)
    has_bias = reader.flag("qkv_bias", default=True)
    return {**_qwen2(reader), "has_qkv_bias": has_bias, "moe": moe}


def read_qwen3(reader: ConfigReader) -> Fields:
    """Read Qwen3, whose queries and keys are normalised."""
    has_bias = reader.flag("attention_bias", default=False)
    reader.require("use_qk_norm", default=True, allowed=True)
    return {**_qwen2(reader), "has_qkv_bias": has_bias, "has_qk_norm": True}


def read_qwen3_moe(reader: ConfigReader) -> Fields:
    """Read Qwen3 with experts."""
    return {**read_qwen3(reader), "moe": _qwen_experts(reader, num_shared_experts=0)}


def _qwen_experts(reader: ConfigReader, num_shared_experts: int) -> MoeSpec:
    reader.require("decoder_sparse_step", default=1, allowed=1)
    return MoeSpec(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        expert_intermediate=reader.integer("moe_intermediate_size"),
        num_shared_experts=num_shared_experts,
        num_dense_layers=reader.dense_prefix("mlp_only_layers"),
    )


def _internlm(reader: ConfigReader) -> Fields:
    return {**read_decoder(reader), "has_qkv_bias": reader.flag("bias", default=False)}


def _gemma(reader: ConfigReader) -> Fields:
    reader.assume({"hidden_act": "gelu", "tie_word_embeddings": True})
    return read_decoder(reader)


def _layer_period(reader: ConfigReader, num_layers: int) -> int:
    """Return how often a layer sees all tokens, from the list of layer types; 0 for never."""
    types = reader.texts("layer_types")
    full = [place for place, name in enumerate(types) if name == "full_attention"]
    if not full:
        return 0
    period = full[0] + 1
    if len(types) != num_layers or full != list(range(period - 1, num_layers, period)):
        reader.refuse("layer_types", "full attention must be in every n-th layer")
    return period


def _gpt_oss(reader: ConfigReader) -> Fields:
    fields = read_decoder(reader)
    moe = MoeSpec(
        num_experts=reader.integer("num_local_experts"),
        top_k=reader.integer("num_experts_per_tok", "experts_per_token"),
        expert_intermediate=fields["intermediate"],
    )
    reader.require("experts_per_token", default=moe.top_k, allowed=moe.top_k)
    return {
        **fields,
        "has_bias": True,
        "has_qkv_bias": reader.flag("attention_bias", default=True),
        "sliding_window": reader.optional("sliding_window", 0),
        "full_attention_period": _layer_period(reader, fields["num_layers"]),
        "moe": moe,
    }


def _deepseek(reader: ConfigReader) -> Fields:
    reader.require("moe_layer_freq", default=1, allowed=1)
    moe = MoeSpec(
        num_experts=reader.integer("n_routed_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        expert_intermediate=reader.integer("moe_intermediate_size"),
        num_shared_experts=reader.optional("n_shared_experts", 0),
        num_dense_layers=reader.optional("first_k_dense_replace", 0),
        **read_groups(reader),
    )
    mla = MlaSpec(
        q_lora_rank=reader.optional("q_lora_rank", 0),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )
    # Older files say the size of a head of nothing that runs.
    reader.ignore("qk_head_dim")
    return {
        **read_decoder(reader),
        "head_dim": mla.v_head_dim,
        "moe": moe,
        "mla": mla,
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _mimo(reader: ConfigReader) -> Fields:
    return {**_qwen2(reader), "extras": prediction_heads(reader, "num_nextn_predict_layers")}


def _read_old(reader: ConfigReader, **own: object) -> Fields:
    """Read models of layer norm with biases, whose halves have no gate and are four times wider."""
    reader.assume({"hidden_act": "gelu"})
    old = {"is_gated": False, "norm": "layer_norm", "has_bias": True}
    return {**read_decoder(reader, times_wider=4), **old, **own}


def _classic(reader: ConfigReader) -> Fields:
    """Read GPT-NeoX and Phi."""
    reader.require("attention_bias", default=True, allowed=True)
    is_parallel = reader.flag("use_parallel_residual", default=True)
    return _read_old(reader, has_parallel_residual=is_parallel)


def _phi(reader: ConfigReader) -> Fields:
    reader.require("qk_layernorm", default=False, allowed=False)
    return _classic(reader)


# What GPT-2 and its descendants call dimensions.
_GPT_2 = {
    "activation_function": "hidden_act",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": _LENGTH,
}


def _gpt2(reader: ConfigReader, **own: object) -> Fields:
    reader.assume({"n_positions": reader.get("n_ctx"), "tie_word_embeddings": True})
    reader.rename(_GPT_2)
    return _read_old(reader, **{"position": "learned", **own})


def _gpt_bigcode(reader: ConfigReader) -> Fields:
    """Read StarCoder, whose heads may share keys and values."""
    num_kv_heads = 1 if reader.flag("multi_query", default=True) else reader.integer("n_head")
    reader.require("add_cross_attention", default=False, allowed=False)
    reader.ignore("attention_softmax_in_fp32", "num_key_value_heads", "inference_runner")
    reader.ignore("pre_allocate_kv_cache", "validate_runner_input", "max_sequence_length")
    return _gpt2(reader, num_kv_heads=num_kv_heads)


def _gptj(reader: ConfigReader) -> Fields:
    """Read GPT-J and CodeGen; biases of their MLPs are not counted."""
    reader.ignore("rotary_dim", "rotary")
    reader.assume({"tie_word_embeddings": False})
    return _gpt2(reader, position="rope", has_bias=False, has_parallel_residual=True)


def read_falcon(reader: ConfigReader) -> Fields:
    """Read Falcon and Falcon 2: one head of keys and values, or groups in the newer layers."""
    reader.rename({"activation": "hidden_act", "ffn_hidden_size": "intermediate_size"})
    reader.rename({"num_kv_heads": "num_key_value_heads"})
    reader.assume({_LENGTH: 2048, "tie_word_embeddings": True})
    reader.require("parallel_attn", default=True, allowed=True)
    is_grouped = reader.flag("new_decoder_architecture", default=False)
    is_shared = reader.flag("multi_query", default=True) and not is_grouped
    # The norms of a layer.
    reader.ignore("num_ln_in_parallel_attn", "apply_residual_connection_post_layernorm")
    has_bias = reader.flag("bias", default=False)
    fields = _read_old(reader, has_bias=has_bias, has_parallel_residual=True)
    return {**fields, "num_kv_heads": 1 if is_shared else fields["num_kv_heads"]}


def _opt(reader: ConfigReader) -> Fields:
    reader.rename({"ffn_dim": "intermediate_size", "activation_function": "hidden_act"})
    reader.assume({"tie_word_embeddings": True})
    hidden = reader.integer("hidden_size")
    reader.require("do_layer_norm_before", default=True, allowed=True)
    reader.require("word_embed_proj_dim", default=hidden, allowed=hidden)
    reader.require("layer_norm_elementwise_affine", default=True, allowed=True)
    reader.ignore("layerdrop", "_remove_final_layer_norm")
    return _read_old(reader, position="learned", has_bias=reader.flag("enable_bias", default=True))


DECODERS: Mapping[str, Callable[[ConfigReader], Fields]] = {
    "codegen": _gptj,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _classic,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "internlm": _internlm,
    "internlm2": _internlm,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mimo": _mimo,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "phi": _phi,
    "qwen": _qwen,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
}
