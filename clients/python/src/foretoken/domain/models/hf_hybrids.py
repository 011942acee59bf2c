"""Hugging Face files of models that mix attention with state spaces, delta nets or convolutions.

Each model type is one function of `HYBRIDS` that says which keys it has and what they mean.
Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from foretoken.domain.models.hf_parts import (
    Fields,
    Halves,
    compose,
    dense_first,
    latent_dims,
    layers_of,
    mlp_of,
    prediction_heads,
    read_attention,
    read_experts,
    read_trunk,
    shared_width,
)
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth


def read_mamba2(reader: ConfigReader) -> LayerPart:
    """Return the Mamba2 of files that name its dimensions as Granite 4, Bamba and Falcon-H1 do."""
    heads = reader.integer("mamba_n_heads")
    wide = reader.integer("hidden_size") * reader.optional("mamba_expand", 2)
    inner = reader.optional("mamba_d_ssm", wide)
    own = reader.get("mamba_d_head")
    reader.require("mamba_conv_bias", default=True, allowed=True)
    # Chunks are those of its kernel.
    reader.ignore("mamba_chunk_size")
    return LayerPart(
        kind="mamba2",
        dims={
            "num_heads": heads,
            "head_dim": own if isinstance(own, int) else inner // heads,
            "state_dim": reader.integer("mamba_d_state"),
            "num_groups": reader.optional("mamba_n_groups", 1),
            "conv_kernel": reader.integer("mamba_d_conv"),
            "has_bias": int(reader.flag("mamba_proj_bias", default=False)),
        },
    )


def read_mamba(reader: ConfigReader, norm: int) -> LayerPart:
    """Return the Mamba of files that name its dimensions as Jamba does."""
    hidden = reader.integer("hidden_size")
    rank = reader.get("mamba_dt_rank")
    reader.require("mamba_conv_bias", default=True, allowed=True)
    return LayerPart(
        kind="mamba",
        dims={
            "channels": hidden * reader.optional("mamba_expand", 2),
            "state_dim": reader.optional("mamba_d_state", 16),
            "step_rank": rank if isinstance(rank, int) else -(-hidden // 16),
            "conv_kernel": reader.optional("mamba_d_conv", 4),
            "has_bias": int(reader.flag("mamba_proj_bias", default=False)),
            "norm": norm,
        },
    )


def read_gated_delta(reader: ConfigReader) -> LayerPart:
    """Return the gated delta net of a file."""
    return LayerPart(
        kind="gated_delta",
        dims={
            "num_key_heads": reader.integer("linear_num_key_heads"),
            "key_head_dim": reader.integer("linear_key_head_dim"),
            "num_value_heads": reader.integer("linear_num_value_heads"),
            "value_head_dim": reader.integer("linear_value_head_dim"),
            "conv_kernel": reader.integer("linear_conv_kernel_dim"),
            "state_bytes": 4 if reader.get("mamba_ssm_dtype") in (None, "float32") else 2,
        },
    )


def _dense(reader: ConfigReader) -> LayerPart:
    reader.require("mlp_bias", default=False, allowed=False)
    return mlp_of(reader.integer("intermediate_size"))


def _bamba(reader: ConfigReader) -> Fields:
    """Read Bamba: Mamba2, with attention in the layers that a list names."""
    num_layers, half = reader.integer("num_hidden_layers"), _dense(reader)
    attention, mamba = read_attention(reader), read_mamba2(reader)
    reader.ignore("z_loss_coefficient", "attn_rotary_emb")
    full = reader.get("attn_layer_indices") or []
    kinds = ("mamba", "attention", "linear_attention", "full_attention")
    types = reader.names("layers_block_type", num_layers, kinds)
    sees_all = [layer in full for layer in range(num_layers)]
    if types:
        sees_all = [kind in ("attention", "full_attention") for kind in types]
    halves: list[Halves] = [(attention if is_full else mamba, half) for is_full in sees_all]
    return {**read_trunk(reader), **compose(halves)}


# Tokens of a model that takes any number.
_ANY_LENGTH = 2**20
# Factors of Falcon-H1's products.
_MULTIPLIERS = (
    *("lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier"),
    *("attention_in_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier"),
)


def _falcon_h1(reader: ConfigReader) -> Fields:
    """Read Falcon-H1, whose layers have Mamba2 and attention next to each other.

    They are in a row here, with a norm more; the norm of a state's output, which few have, is
    counted.
    """
    reader.require("projectors_bias", default=False, allowed=False)
    reader.ignore("mamba_norm_before_gate", "mamba_rms_norm", "mamba_use_mlp", *_MULTIPLIERS)
    reader.ignore("attn_layer_indices", "mlp_expansion_factor")
    layer = [(read_mamba2(reader), None), (read_attention(reader), _dense(reader))]
    return {**read_trunk(reader), **compose(layer * reader.integer("num_hidden_layers"))}


def _olmo_hybrid(reader: ConfigReader) -> Fields:
    """Read OLMo hybrids: gated delta nets, and every fourth layer attention."""
    num_layers, half = reader.integer("num_hidden_layers"), _dense(reader)
    has_rope = int(reader.has("rope_parameters") or reader.has("rope_theta"))
    attention = read_attention(reader, qk_norm=2, has_rope=has_rope)
    delta = read_gated_delta(reader)
    # How its decays are initialised.
    reader.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")
    reader.ignore("linear_dt_init_floor", "linear_allow_neg_eigval", "linear_use_gate")
    mixers = [attention if is_full else delta for is_full in _listed_full(reader, num_layers)]
    return {**read_trunk(reader), **compose([(mixer, half) for mixer in mixers])}


def _listed_full(reader: ConfigReader, num_layers: int) -> Sequence[bool]:
    """Return of every layer whether it sees all tokens, which a file has to list."""
    types = _types(reader, num_layers, ("linear_attention", "full_attention"))
    return [kind == "full_attention" for kind in types]


def _types(reader: ConfigReader, num_layers: int, known: Sequence[str]) -> Sequence[str]:
    """Return the type of every layer, which a file has to list."""
    types = reader.names("layer_types", num_layers, known)
    if types is None:
        reader.refuse("layer_types", f"expected one of {', '.join(known)} for every layer")
    return types or [known[-1]] * num_layers


# What Mamba's and Mamba2's own files call dimensions that those of hybrids have.
_PURE = {
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}


def _pure_mamba(norm: int, reader: ConfigReader) -> Fields:
    """Read Mamba and Falcon-Mamba, whose layers have neither attention nor feed-forward halves."""
    reader.rename(_PURE)
    # What says dimensions again, how steps are initialised, and which of its kernels it takes.
    reader.ignore("d_inner", "d_model", "intermediate_size", "layer_types", "n_layer", "ssm_cfg")
    reader.ignore("fused_add_norm", "mixer_rms_eps", "pad_vocab_size_multiple", "rms_norm")
    reader.ignore("time_step_init_scheme", "time_step_scale", "use_associative_scan")
    reader.ignore("use_mambapy")
    reader.assume({"max_position_embeddings": _ANY_LENGTH, "tie_word_embeddings": True})
    layers: list[Halves] = [(read_mamba(reader, norm), None)]
    return {**read_trunk(reader), **compose(layers * reader.integer("num_hidden_layers"))}


def _jamba(reader: ConfigReader) -> Fields:
    """Read Jamba: Mamba, and attention without positions in every n-th layer, some with experts."""
    num_layers = reader.integer("num_hidden_layers")
    reader.ignore("layer_types", "layers_block_type", "use_associative_scan", "use_mambapy")
    reader.ignore("num_experts_per_tok")
    sees_all = every_nth(num_layers, *_turn(reader, "attn", (8, 4)))
    mamba, attention = read_mamba(reader, 2), read_attention(reader, has_rope=0)
    width = reader.integer("intermediate_size")
    dense = experts = mlp_of(width)
    if reader.optional("num_experts", 16) > 1:
        experts = read_experts(reader, intermediate=width)
    has_experts = every_nth(num_layers, *_turn(reader, "expert", (2, 1)))
    mixers = [attention if is_full else mamba for is_full in sees_all]
    halves = [experts if is_routed else dense for is_routed in has_experts]
    return {**read_trunk(reader), **compose(list(zip(mixers, halves, strict=True)))}


def _turn(reader: ConfigReader, name: str, defaults: tuple[int, int]) -> tuple[int, int]:
    """Return of how many layers one is of a name, and at which place of them."""
    period = max(reader.optional(f"{name}_layer_period", defaults[0]), 1)
    return period, reader.optional(f"{name}_layer_offset", defaults[1])


def _pure_mamba2(reader: ConfigReader) -> Fields:
    """Read Mamba2, whose layers have no attention and no feed-forward half."""
    reader.rename({"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head"})
    reader.rename({**_PURE, "n_groups": "mamba_n_groups", "chunk_size": "mamba_chunk_size"})
    reader.ignore("mamba_dt_rank", "mamba_expand", "rms_norm")
    # Nothing of it depends on how long a sequence is.
    reader.assume({"max_position_embeddings": _ANY_LENGTH})
    layers: list[Halves] = [(read_mamba2(reader), None)] * reader.integer("num_hidden_layers")
    return {**read_trunk(reader), **compose(layers)}


# What MiniMax-Text-01's files scale the residual stream and halves of layers by.
_RESIDUAL_FACTORS = tuple(
    name.format(factor)
    for name in (
        *("full_attn_{}_factor", "linear_attn_{}_factor", "mlp_{}_factor"),
        *("layernorm_full_attention_{}", "layernorm_linear_attention_{}", "layernorm_mlp_{}"),
    )
    for factor in ("alpha", "beta")
)


def _minimax(reader: ConfigReader) -> Fields:
    """Read MiniMax-Text-01 and M1: lightning attention, all of it in some layers, and experts."""
    num_layers = reader.integer("num_hidden_layers")
    reader.ignore("block_size", "postnorm", "shared_moe_mode", *_RESIDUAL_FACTORS)
    full = read_attention(reader)
    dims = {name: full[name] for name in ("num_heads", "head_dim")}
    lightning = LayerPart(kind="lightning", dims=dims)
    flags: Sequence[int] | None = reader.numbers("attn_type_list", num_layers)
    if flags is None:
        flags = _listed_full(reader, num_layers)
    experts = read_experts(
        reader,
        intermediate=reader.integer("intermediate_size"),
        shared_intermediate=reader.optional("shared_intermediate_size", 0),
        has_fp32_router=1,
    )
    mixers = [full if flag else lightning for flag in flags]
    return {**read_trunk(reader), **compose([(mixer, experts) for mixer in mixers])}


def _bailing_hybrid(reader: ConfigReader) -> Fields:
    """Read Ling's hybrids: delta attention with full gates, and latent attention every so often.

    Gates of the latent attention's heads are not counted.
    """
    num_layers = reader.integer("num_hidden_layers")
    reader.rename({"model_max_length": "max_position_embeddings"})
    by_group = every_nth(num_layers, max(reader.optional("layer_group_size", 1), 1))
    sees_all = layers_of(reader, "full_attention", "linear_attention", by_group)
    delta = LayerPart(
        kind="kda",
        dims={
            "num_heads": reader.integer("linear_num_heads", "num_attention_heads"),
            "head_dim": reader.integer("linear_head_dim", "head_dim"),
            "conv_kernel": reader.integer("linear_conv_kernel_dim", "short_conv_kernel_size"),
            "has_full_gate": 1,
            "has_full_forget_gate": 1,
        },
    )
    latent = LayerPart(kind="latent", dims=latent_dims(reader))
    reader.ignore("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    reader.ignore("short_conv_kernel_size", "kda_lower_bound", "kda_safe_gate")
    reader.ignore("mtp_loss_scaling_factor")
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    halves = dense_first(reader, mlp_of(reader.integer("intermediate_size")), experts)
    mixers = [latent if is_full else delta for is_full in sees_all]
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _lara(reader: ConfigReader) -> Fields:
    """Read Lara: gated delta nets, and attention over all tokens or windows, with experts."""
    num_layers = reader.integer("num_hidden_layers")
    types = _types(reader, num_layers, ("linear_attention", "sliding_attention", "full_attention"))
    full = read_attention(reader, qk_norm=1)
    mixers = {
        "linear_attention": read_gated_delta(reader),
        "sliding_attention": full.changed(window=reader.integer("sliding_window")),
        "full_attention": full,
    }
    shared = reader.optional("shared_expert_intermediate_size", 0)
    experts = read_experts(reader, shared_intermediate=shared)
    return {**read_trunk(reader), **compose([(mixers[kind], experts) for kind in types])}


def _lfm2(reader: ConfigReader) -> Fields:
    """Read LFM2 and LFM3: short convolutions, and attention in some layers, windows among it."""
    num_layers = reader.integer("num_hidden_layers")
    reader.rename({"block_dim": "hidden_size", "num_heads": "num_attention_heads"})
    reader.assume({"tie_word_embeddings": reader.get("tie_embedding", True)})
    reader.require("conv_dim", default=reader.get("hidden_size"), allowed=reader.get("hidden_size"))
    reader.ignore("conv_dim_out", "conv_use_xavier_init", "block_mlp_init_scale", "block_norm_eps")
    reader.ignore("block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "theta")
    reader.ignore("use_pos_enc", "use_expert_bias", "block_ff_dim")
    reader.ignore("use_sandwich_norm")
    # A gate for every head.
    gate = 2 * reader.flag("use_attention_gate", default=False)
    attention = read_attention(reader, qk_norm=1, gate=gate)
    conv = LayerPart(
        kind="short_conv",
        dims={
            "channels": reader.integer("hidden_size"),
            "conv_kernel": reader.integer("conv_L_cache"),
            "has_bias": int(reader.flag("conv_bias", default=False)),
        },
    )
    windowed = attention.changed(window=reader.optional("sliding_window", 0))
    mixer_of = {"conv": conv, "full_attention": attention, "sliding_attention": windowed}
    full = reader.get("full_attn_idxs")
    types = reader.names("layer_types", num_layers, tuple(mixer_of))
    if types is None and isinstance(full, list):
        types = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    if types is None:
        reader.refuse("layer_types", "required where full_attn_idxs is missing")
    mixers = [mixer_of[kind] for kind in types or ["conv"] * num_layers]
    halves = _lfm2_halves(reader, num_layers)
    return {**read_trunk(reader), **compose(list(zip(mixers, halves, strict=True)))}


def _lfm2_halves(reader: ConfigReader, num_layers: int) -> list[LayerPart]:
    """Return the feed-forward half of every layer: dense, or experts after the first ones."""
    width = reader.integer("block_ff_dim", "intermediate_size")
    reader.ignore("intermediate_size")
    if reader.has("num_experts"):
        num_dense = reader.optional("num_dense_layers", 0)
        experts = read_experts(reader)
        return [mlp_of(width)] * num_dense + [experts] * (num_layers - num_dense)
    multiple = max(reader.optional("block_multiple_of", 1), 1)
    factor = reader.get("block_ffn_dim_multiplier", 1.0)
    if reader.flag("block_auto_adjust_ff_dim", default=False):
        # Source: transformers, Lfm2MLP.
        scaled = int((factor if isinstance(factor, int | float) else 1) * int(2 * width / 3))
        width = -(-scaled // multiple) * multiple
    return [mlp_of(width)] * num_layers


HYBRIDS: Mapping[str, Callable[[ConfigReader], Fields]] = {
    "bailing_hybrid": _bailing_hybrid,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": partial(_pure_mamba, 1),
    "jamba": _jamba,
    "lara_mini": _lara,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": _lfm2,
    "mamba": partial(_pure_mamba, 0),
    "mamba2": _pure_mamba2,
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "olmo_hybrid": _olmo_hybrid,
}
