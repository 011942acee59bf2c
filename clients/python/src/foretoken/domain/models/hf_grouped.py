"""Hugging Face files of models of grouped attention that differ from Llama in a few ways.

Each model type is one row of `GROUPED`. Norms after a half of a layer, which some of them have in
addition, are not counted. Source: the configuration and modelling files of these models in
transformers 5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foretoken.domain.models.hf_decoders import read_falcon
from foretoken.domain.models.hf_parts import (
    Fields,
    compose,
    dense_first,
    mlp_of,
    prediction_heads,
    read_attention,
    read_experts,
    read_trunk,
    shared_width,
)
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """How the files of a family differ from Llama's.

    `period` counts the layers to one that sees all tokens where the file lists none (0: none does;
    below 0: the first of so many does);
    with `turns_in_windows` the others turn by position only, without `turns` none does (ALiBi adds
    to the scores inside attention's kernel). `qk_norm` is of attention (see its
    kind), for files that do not say `use_qk_norm` where `is_normed`. `biases` are the keys of the
    biases of queries, keys and values, of attention's output and of dense halves; empty: none.
    `gate` is of attention too, and all of its layers have `has_sinks`.
    `halves` returns the feed-forward half of every layer; without it they are dense. `defaults` are
    those of the family's configuration class for keys that its files leave out; `renamed` are keys
    by names of its own, with the usual ones; `ignored` keys say what holds for all of the family,
    or run no operator.
    """

    period: int = 0
    turns: bool = True
    turns_in_windows: bool = False
    qk_norm: int = 0
    is_normed: bool = True
    is_gated: bool = True
    biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    norm: str = "rms_norm"
    is_parallel: bool = False
    gate: int = 0
    has_sinks: bool = False
    halves: Callable[[ConfigReader], Sequence[LayerPart]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def _read(family: Grouped, reader: ConfigReader) -> Fields:
    reader.rename(family.renamed)
    reader.assume(family.defaults)
    reader.ignore(*family.ignored)
    mixers = _mixers(family, reader)
    of_mlp = _flag(reader, family.biases[2])
    if family.halves is None:
        width = reader.integer("intermediate_size")
        dense = mlp_of(width, family.is_gated).changed(has_bias=of_mlp)
        halves: Sequence[LayerPart] = [dense] * len(mixers)
    else:
        halves = family.halves(reader)
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "norm": family.norm,
        "has_parallel_residual": reader.flag("use_parallel_residual", default=family.is_parallel),
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _flag(reader: ConfigReader, key: str) -> int:
    return int(bool(key) and reader.flag(key, default=False))


def _mixers(family: Grouped, reader: ConfigReader) -> list[LayerPart]:
    """Return the attention of every layer."""
    of_qkv, of_output = (_flag(reader, key) for key in family.biases[:2])
    is_normed = reader.flag("use_qk_norm", default=family.is_normed)
    full = read_attention(
        reader,
        qk_norm=family.qk_norm * is_normed,
        has_qkv_bias=of_qkv,
        has_out_bias=of_output,
        gate=family.gate,
        has_sinks=int(family.has_sinks),
    )
    sees_all = _sees_all(reader, family.period)
    if not all(sees_all):
        windowed = full.changed(window=reader.integer("sliding_window"))
        full = full.changed(has_rope=int(not family.turns_in_windows))
        return [full if is_full else windowed for is_full in sees_all]
    reader.ignore("sliding_window")
    turns = reader.numbers("no_rope_layers", len(sees_all)) or [family.turns] * len(sees_all)
    reader.ignore("no_rope_layer_interval")
    return [full.changed(has_rope=int(bool(flag))) for flag in turns]


def _sees_all(reader: ConfigReader, period: int) -> list[bool]:
    """Return of every layer whether it sees all tokens: as listed, by a text, or by a period."""
    num_layers = reader.integer("num_hidden_layers")
    types = reader.names("layer_types", num_layers, ("full_attention", "sliding_attention"))
    # Of files that have it nothing but these layers says where windows are.
    reader.ignore("max_window_layers")
    pattern, is_off = reader.get("sliding_window_pattern"), not reader.has("sliding_window")
    if types:
        return [kind == "full_attention" for kind in types]
    if is_off or reader.get("use_sliding_window") is False:
        return [True] * num_layers
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        letters = (pattern * num_layers)[: num_layers - 1] + "G"
        return [letter == "G" for letter in letters]
    period = reader.optional("sliding_window_pattern", period)
    return every_nth(num_layers, abs(period), -1 if period > 0 else 0)


def _first_dense(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return dense halves, then experts of a width of their own."""
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    return dense_first(reader, mlp_of(reader.optional("intermediate_size", 1)), experts)


def _all_experts(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return experts of the width that dense halves have elsewhere."""
    experts = read_experts(
        reader,
        intermediate=reader.integer("intermediate_size"),
        shared_intermediate=reader.optional("shared_intermediate_size", 0),
    )
    return [experts] * reader.integer("num_hidden_layers")


def _own_width(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return experts and one that all share, of widths of their own; some layers are dense."""
    num_layers = reader.integer("num_hidden_layers")
    reader.require("decoder_sparse_step", default=1, allowed=1)
    shared = reader.optional("shared_expert_intermediate_size", 0)
    experts = read_experts(reader, shared_intermediate=shared)
    dense = mlp_of(reader.optional("intermediate_size", 1))
    first = reader.dense_prefix("mlp_only_layers")
    if reader.has("mlp_layer_types"):
        return dense_first(reader, dense, experts)
    return [dense] * first + [experts] * (num_layers - first)


def _hunyuan(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return experts, whose number and width files may say for every layer, all alike.

    Shared ones are as wide as the dense halves of other models, of which routed ones are too.
    """
    width = reader.integer("intermediate_size")
    num_experts = reader.alike("num_experts", 1)
    top_k = reader.alike("num_experts_per_tok", 1)
    width = reader.alike("moe_intermediate_size", width)
    shared = width * reader.alike("num_shared_expert", 1)
    dims = {"num_experts": num_experts, "top_k": top_k, "intermediate": width}
    experts = LayerPart(kind="experts", dims={**dims, "shared_intermediate": shared})
    return [experts] * reader.integer("num_hidden_layers")


def _aria(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return experts as wide as dense halves elsewhere, and so many times that width shared."""
    width = reader.integer("intermediate_size")
    shared = width * reader.optional("moe_num_shared_experts", 0)
    experts = read_experts(reader, intermediate=width, shared_intermediate=shared)
    return [experts] * reader.integer("num_hidden_layers")


def _cohere_moe(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return experts as wide as dense halves elsewhere, where no width is said for dense ones.

    They run after attention here, with a norm more; the model adds both to the same residual.
    """
    width = reader.integer("intermediate_size")
    shared = shared_width(reader)
    experts = read_experts(reader, intermediate=width, shared_intermediate=shared)
    dense = mlp_of(reader.optional("prefix_dense_intermediate_size", width))
    return dense_first(reader, dense, experts)


def _ernie(reader: ConfigReader) -> Sequence[LayerPart]:
    """Return dense halves, with experts in every n-th layer from one to another."""
    num_layers = reader.integer("num_hidden_layers")
    width = reader.integer("moe_intermediate_size")
    dims = {
        "num_experts": reader.integer("moe_num_experts"),
        "top_k": reader.integer("moe_k"),
        "intermediate": width,
        "shared_intermediate": width * reader.optional("moe_num_shared_experts", 0),
        "has_fp32_router": 1,
    }
    experts = LayerPart(kind="experts", dims=dims)
    dense = mlp_of(reader.integer("intermediate_size"))
    first = reader.optional("moe_layer_start_index", 1)
    last = reader.optional("moe_layer_end_index", -1)
    step = max(reader.optional("moe_layer_interval", 1), 1)
    routed = range(first, num_layers if last < 0 else last + 1, step)
    return [experts if layer in routed else dense for layer in range(num_layers)]


def _mpt(reader: ConfigReader) -> Fields:
    """Read MPT, whose halves are a multiple of its width; attention has a section of its own."""
    attention = reader.section("attn_config")
    for key, allowed in (("alibi", True), ("prefix_lm", False), ("qk_ln", False)):
        attention.require(key, default=allowed, allowed=allowed)
    attention.require("attn_type", "multihead_attention", "multihead_attention")
    attention.ignore("alibi_bias_max", "attn_impl", "attn_pdrop", "attn_uses_sequence_id")
    attention.ignore("clip_qkv", "softmax_scale")
    reader.require("no_bias", default=True, allowed=True)
    ratio = reader.optional("expansion_ratio", 4)
    family = Grouped(
        turns=False,
        is_gated=False,
        norm="layer_norm",
        defaults={**_TIED, **_GELU, "intermediate_size": ratio * reader.integer("d_model")},
        renamed={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        # Positions are ALiBi's whatever the first says.
        ignored=(
            *("learned_pos_emb", "embedding_fraction", "init_config", "init_device", "norm_type"),
            "tokenizer_name",
        ),
    )
    return _read(family, reader)


def _falcon(reader: ConfigReader) -> Fields:
    """Read Falcon, and Falcon-RW, whose positions are slopes of scores (ALiBi)."""
    if not reader.flag("alibi", default=False):
        return read_falcon(reader)
    for key, default in (("multi_query", True), ("parallel_attn", True)):
        reader.require(key, default=default, allowed=False)
    reader.require("new_decoder_architecture", default=False, allowed=False)
    family = Grouped(
        turns=False,
        is_gated=False,
        biases=("bias", "bias", "bias"),
        norm="layer_norm",
        defaults={
            **_TIED,
            **_GELU,
            "bias": False,
            "intermediate_size": 4 * reader.integer("hidden_size"),
            "max_position_embeddings": 2048,
        },
        renamed={"activation": "hidden_act", "ffn_hidden_size": "intermediate_size"},
        ignored=("num_ln_in_parallel_attn", "num_kv_heads", "rope_theta"),
    )
    reader.ignore("apply_residual_connection_post_layernorm", "rope_parameters")
    return _read(family, reader)


def _bloom(reader: ConfigReader) -> Fields:
    """Read BLOOM, whose halves are four times as wide; the norm of its embedding is not counted."""
    reader.rename({"n_embed": "hidden_size", "seq_length": "max_position_embeddings"})
    reader.require("apply_residual_connection_post_layernorm", default=False, allowed=False)
    family = Grouped(
        turns=False,
        is_gated=False,
        biases=_BIASED,
        norm="layer_norm",
        defaults={
            **_TIED,
            **_GELU,
            "use_bias": True,
            "intermediate_size": 4 * reader.integer("hidden_size"),
            # What it was trained with: nothing in it depends on a sequence's length.
            "max_position_embeddings": 2048,
        },
        renamed={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
        ignored=("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
    )
    reader.ignore("offset_alibi", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv")
    reader.ignore("unk_token_id")
    return _read(family, reader)


# Rotary features and limits of scores aside, what Gemma3TextConfig takes.
_GEMMA_3 = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA_2 = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_OF_QKV = ("attention_bias", "", "mlp_bias")
_TIED = {"tie_word_embeddings": True}
_GELU = {"hidden_act": "gelu"}
_BIASED = ("use_bias", "use_bias", "use_bias")

_APERTUS = Grouped(qk_norm=1, is_gated=False, ignored=("qk_norm", "post_norm"))
# What Hunyuan's files say of parts that these models do not have, or of all of them.
_HUNYUAN = (
    *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num"),
    *("dense_list", "enable_lm_head_fp32", "kv_lora_rank", "mask_init_id", "moe_drop_tokens"),
    *("moe_random_routing_dropped_token", "norm_type", "num_media_embeds", "org_vocab_size"),
    *("pool_type", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "use_mixed_mlp_moe"),
    *("use_rotary_pos_emb", "v_head_dim"),
)
_BY_EXPERT_KEYS = {"moe_topk": "num_experts_per_tok"}

_FAMILIES: Mapping[str, Grouped] = {
    "afmoe": Grouped(
        period=4,
        turns_in_windows=True,
        qk_norm=1,
        gate=1,
        halves=_first_dense,
        renamed={"num_dense_layers": "first_k_dense_replace"},
        ignored=(
            *("global_attn_every_n_layers", "load_balance_coeff", "mup_enabled"),
            *("num_expert_groups", "num_limited_groups", "route_norm", "route_scale"),
            *("score_func", "use_grouped_mm"),
        ),
    ),
    "apertus": _APERTUS,
    "apertus1p5_text": _APERTUS,
    "aria_text": Grouped(halves=_aria, renamed=_BY_EXPERT_KEYS),
    "arcee": Grouped(is_gated=False),
    "bailing_moe": Grouped(
        qk_norm=1,
        is_normed=False,
        biases=("use_qkv_bias", "use_bias", "use_bias"),
        halves=_first_dense,
        ignored=(
            *("moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size"),
            *("mtp_loss_scaling_factor", "norm_head", "norm_softmax", "router_dtype"),
            *("score_function", "use_rmsnorm"),
        ),
    ),
    "bitnet": Grouped(),
    "cohere": Grouped(
        qk_norm=1, is_normed=False, norm="layer_norm", is_parallel=True, defaults=_TIED
    ),
    "cohere2": Grouped(
        period=4,
        turns_in_windows=True,
        norm="layer_norm",
        is_parallel=True,
        defaults=_TIED,
        ignored=(
            *("layer_switch", "order_of_interleaved_layers", "position_embedding_type"),
            *("rotary_pct", "use_embedding_sharing", "use_gated_activation"),
            *("use_parallel_block", "use_parallel_embedding"),
        ),
    ),
    "cohere2_moe": Grouped(
        period=4,
        turns_in_windows=True,
        norm="layer_norm",
        halves=_cohere_moe,
        defaults=_TIED,
        ignored=(
            *("expert_selection_fn", "prefix_dense_sliding_window_pattern"),
            "shared_expert_combination_strategy",
        ),
    ),
    "cwm": Grouped(period=-4),
    "dots1": Grouped(qk_norm=1, halves=_first_dense),
    "ernie4_5": Grouped(biases=_BIASED, defaults=_TIED),
    "ernie4_5_moe": Grouped(
        biases=_BIASED,
        halves=_ernie,
        defaults=_TIED,
        ignored=("compression_ratio", "moe_capacity", "moe_gate", "moe_use_aux_free"),
    ),
    "exaone": Grouped(
        renamed={"num_layers": "num_hidden_layers", "activation_function": "hidden_act"}
    ),
    "exaone4": Grouped(period=4, turns_in_windows=True, qk_norm=1),
    "exaone_moe": Grouped(period=4, turns_in_windows=True, qk_norm=1, halves=_first_dense),
    "flex_olmo": Grouped(qk_norm=2, halves=_all_experts),
    "flint": Grouped(qk_norm=1, has_sinks=True, halves=_own_width),
    "gemma2": Grouped(period=2, defaults=_GEMMA_2),
    "gemma3_text": Grouped(period=6, qk_norm=1, defaults=_GEMMA_3),
    "glm": Grouped(biases=_OF_QKV),
    "glm4": Grouped(biases=_OF_QKV),
    "glm4_moe": Grouped(biases=_OF_QKV, qk_norm=1, is_normed=False, halves=_first_dense),
    "glm4v_moe_text": Grouped(biases=_OF_QKV, halves=_first_dense),
    "glm4v_text": Grouped(biases=_OF_QKV, defaults={"attention_bias": True}),
    "granite": Grouped(),
    "granite_swa": Grouped(period=-4, has_sinks=True, ignored=("layer_rope_theta",)),
    "granitemoe": Grouped(halves=_all_experts),
    "granitemoeshared": Grouped(halves=_all_experts),
    "granitemoe_swa": Grouped(
        period=-4, has_sinks=True, halves=_all_experts, ignored=("layer_rope_theta",)
    ),
    "helium": Grouped(),
    "hunyuan_v1_dense": Grouped(qk_norm=1, ignored=_HUNYUAN),
    "hunyuan_v1_moe": Grouped(
        qk_norm=1, halves=_hunyuan, renamed=_BY_EXPERT_KEYS, ignored=_HUNYUAN
    ),
    "hy_v3": Grouped(
        qk_norm=1,
        halves=_first_dense,
        ignored=("enable_moe_fp32_combine", "router_scaling_factor"),
    ),
    "hyperclovax": Grouped(ignored=("use_post_norm",)),
    "internlm3": Grouped(biases=("qkv_bias", "bias", "bias")),
    "iquestcoder": Grouped(),
    "jais2": Grouped(is_gated=False, norm="layer_norm"),
    "kolibri1": Grouped(qk_norm=1, halves=_own_width),
    "mellum": Grouped(qk_norm=1, halves=_first_dense),
    "ministral": Grouped(),
    "ministral3": Grouped(),
    # Its queries and keys have norms without weights of their own.
    "muse_glimmer_text": Grouped(
        turns_in_windows=True,
        qk_norm=1,
        gate=1,
        ignored=("layer_rope_theta", "output_multiplier", "post_norm_eps", "qk_scale_factor"),
    ),
    "nanochat": Grouped(qk_norm=1, is_gated=False),
    "nemotron": Grouped(is_gated=False, norm="layer_norm"),
    "olmo": Grouped(norm="layer_norm"),
    "olmo2": Grouped(qk_norm=2),
    "olmo3": Grouped(period=4, qk_norm=2),
    "olmoe": Grouped(qk_norm=2, halves=_all_experts),
    "phi3": Grouped(ignored=("full_attn_mod", "interpolate_factor", "lm_head_bias")),
    "phimoe": Grouped(norm="layer_norm", halves=_all_experts, ignored=("lm_head_bias",)),
    "sarvam_moe": Grouped(qk_norm=1, halves=_first_dense),
    "seed_oss": Grouped(biases=("attention_bias", "attention_out_bias", "mlp_bias")),
    "smollm3": Grouped(defaults=_TIED),
    "solar_open": Grouped(halves=_first_dense),
    "stablelm": Grouped(biases=("use_qkv_bias", "", ""), norm="layer_norm"),
    "starcoder2": Grouped(
        is_gated=False,
        biases=_BIASED,
        norm="layer_norm",
        ignored=("attention_softmax_in_fp32", "mlp_type", "norm_type"),
    ),
    "vaultgemma": Grouped(period=2, defaults=_GEMMA_2),
}

GROUPED: Mapping[str, Callable[[ConfigReader], Fields]] = {
    **{model_type: partial(_read, family) for model_type, family in _FAMILIES.items()},
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
}
