"""Hugging Face files of models with recurrent layers, or with halves of layers left out.

Each model type is one function of `RECURRENT` that says which keys it has and what they mean.
Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping

from foretoken.domain.models.hf_hybrids import HYBRIDS, read_gated_delta, read_mamba2
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


def _qwen3_5(reader: ConfigReader) -> Fields:
    """Read Qwen3.5 and 3.6: gated delta nets, and every fourth layer attention with a gate."""
    num_layers = reader.integer("num_hidden_layers")
    by_interval = every_nth(num_layers, reader.optional("full_attention_interval", 4))
    sees_all = layers_of(reader, "full_attention", "linear_attention", by_interval)
    gate = int(reader.flag("attn_output_gate", default=True))
    attention = read_attention(reader, qk_norm=1, gate=gate)
    delta = read_gated_delta(reader)
    if reader.has("num_experts"):
        reader.require("decoder_sparse_step", default=1, allowed=1)
        reader.require("mlp_only_layers", default=[], allowed=[])
        reader.ignore("intermediate_size")
        half = read_experts(
            reader,
            shared_intermediate=reader.optional("shared_expert_intermediate_size", 0),
            has_shared_gate=1,
        )
    else:
        half = mlp_of(reader.integer("intermediate_size"))
    reader.ignore("mtp_use_dedicated_embeddings")
    mixers = [attention if is_full else delta for is_full in sees_all]
    return {
        **read_trunk(reader),
        **compose([(mixer, half) for mixer in mixers]),
        "extras": prediction_heads(reader, "mtp_num_hidden_layers"),
    }


def _kimi_linear(reader: ConfigReader) -> Fields:
    """Read Kimi Linear and Kimi K3: delta attention, and latent attention without positions."""
    num_layers = reader.integer("num_hidden_layers")
    reader.rename({"model_max_length": "max_position_embeddings"})
    reader.rename({"num_shared_experts": "n_shared_experts"})
    types = reader.names("layer_types", num_layers, ("linear_attention", "full_attention"))
    kda, is_full = _kda_of_types(reader, types) if types else _kda_of_section(reader, num_layers)
    latent = LayerPart(
        kind="latent",
        dims={
            **latent_dims(reader),
            "has_rope": int(not reader.flag("mla_use_nope", default=False)),
            "has_gate": int(reader.flag("mla_use_output_gate", default=False)),
        },
    )
    reader.ignore("latent_moe_use_norm")
    experts = read_experts(
        reader,
        shared_intermediate=shared_width(reader),
        latent=reader.optional("routed_expert_hidden_size", 0),
    )
    halves = dense_first(reader, mlp_of(reader.integer("intermediate_size")), experts)
    mixers = [latent if sees_all else kda for sees_all in is_full]
    block = reader.optional("attn_res_block_size", 0)
    extras = prediction_heads(reader, "num_nextn_predict_layers")
    if block > 0:
        extras += (LayerPart(kind="residual_attention", dims={"block_size": block}),)
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": extras,
    }


def _kda_of_types(reader: ConfigReader, types: list[str]) -> tuple[LayerPart, list[bool]]:
    """Return the delta attention of a file that lists its layers, and which of them it is not."""
    dims = {
        "num_heads": reader.integer("linear_num_heads"),
        "head_dim": reader.integer("linear_head_dim"),
        "conv_kernel": reader.integer("linear_conv_kernel_dim"),
    }
    return LayerPart(kind="kda", dims=dims), [kind == "full_attention" for kind in types]


def _kda_of_section(reader: ConfigReader, num_layers: int) -> tuple[LayerPart, list[bool]]:
    """Return the same of older files, which have a section for it that numbers layers from 1."""
    linear = reader.section("linear_attn_config")
    dims = {
        "num_heads": linear.integer("num_heads"),
        "head_dim": linear.integer("head_dim"),
        "conv_kernel": linear.integer("short_conv_kernel_size"),
        "has_full_gate": int(linear.flag("use_full_rank_gate", default=False)),
    }
    linear.ignore("gate_lower_bound")
    full, delta = linear.get("full_attn_layers") or [], linear.get("kda_layers") or []
    if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
        linear.refuse("kda_layers", f"with full_attn_layers must name the {num_layers} layers once")
    is_full = [layer + 1 in full for layer in range(num_layers)]
    return LayerPart(kind="kda", dims=dims), is_full


# Letters of Nemotron-H's patterns.
_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
# What transformers 5.24 calls them.
_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_h(reader: ConfigReader) -> Fields:
    """Read Nemotron-H and Nemotron 3: each layer is a mixer or a feed-forward half alone."""
    pattern = reader.get("hybrid_override_pattern")
    if isinstance(pattern, str) and set(pattern) <= set(_LETTERS):
        types: list[str] = [_LETTERS[letter] for letter in pattern]
    else:
        given = reader.get("layers_block_type")
        length = len(given) if isinstance(given, list) else 1
        known = (*_LETTERS.values(), *_RENAMED)
        types = reader.names("layers_block_type", length, known) or []
        types = [_RENAMED.get(kind, kind) for kind in types]
    if not types:
        reader.refuse("hybrid_override_pattern", f"expected a text of {', '.join(_LETTERS)}")
    if reader.optional("num_hidden_layers", len(types)) != len(types):
        reader.refuse("num_hidden_layers", f"the pattern has {len(types)} layers")
    for key in ("mlp_bias", "use_bias", "mamba_proj_bias"):
        reader.require(key, default=False, allowed=False)
    reader.require("use_conv_bias", default=True, allowed=True)
    # The mixers' own head; `expand` says the heads of Mamba again, chunks are those of its kernel.
    reader.ignore("expand", "chunk_size", "mamba_hidden_act", "mtp_hybrid_override_pattern")
    reader.ignore("mtp_layers_block_type", "sliding_window")
    is_gated = reader.activation("mlp_hidden_act", default="relu2") == "silu"
    makers: Mapping[str, Callable[[ConfigReader, bool], Halves]] = {
        "mamba": lambda reader, _: (_mamba2(reader), None),
        "attention": lambda reader, _: (_nemotron_attention(reader), None),
        "moe": lambda reader, gated: (None, _nemotron_experts(reader, gated)),
        "mlp": lambda reader, gated: (None, mlp_of(reader.integer("intermediate_size"), gated)),
    }
    made = {kind: makers[kind](reader, is_gated) for kind in dict.fromkeys(types)}
    reader.ignore("intermediate_size", "moe_latent_size")
    return {
        **read_trunk(reader),
        "activation": reader.activation("mlp_hidden_act", default="relu2"),
        **compose([made[kind] for kind in types]),
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _nemotron_attention(reader: ConfigReader) -> LayerPart:
    head_dim = reader.optional("attention_head_dim", reader.optional("head_dim", 128))
    return read_attention(reader, head_dim=head_dim, has_rope=0)


def _granite_hybrid(reader: ConfigReader) -> Fields:
    """Read Granite 4: Mamba2 in most layers, attention in the others, experts or not."""
    num_layers = reader.integer("num_hidden_layers")
    kinds = ("mamba", "attention", "linear_attention", "full_attention")
    types = reader.names("layer_types", num_layers, kinds) or ["mamba"] * num_layers
    turns = reader.get("position_embedding_type") == "rope"
    attention = read_attention(reader, has_rope=int(turns))
    mamba = read_mamba2(reader)
    reader.ignore("layers_block_type", "num_experts_per_tok")
    reader.ignore("normalization_function", "init_method")
    width = reader.integer("intermediate_size")
    shared = reader.optional("shared_intermediate_size", 0)
    half = mlp_of(shared or width)
    if reader.has("num_local_experts"):
        half = read_experts(reader, intermediate=width, shared_intermediate=shared)
    mixers = [attention if kind in ("attention", "full_attention") else mamba for kind in types]
    return {**read_trunk(reader), **compose([(mixer, half) for mixer in mixers])}


def _mamba2(reader: ConfigReader) -> LayerPart:
    is_wide = reader.get("mamba_ssm_cache_dtype") in (None, "float32")
    return LayerPart(
        kind="mamba2",
        dims={
            "num_heads": reader.integer("mamba_num_heads"),
            "head_dim": reader.integer("mamba_head_dim"),
            "state_dim": reader.integer("ssm_state_size"),
            "num_groups": reader.integer("n_groups"),
            "conv_kernel": reader.integer("conv_kernel"),
            "state_bytes": 4 if is_wide else 2,
        },
    )


def _nemotron_experts(reader: ConfigReader, is_gated: bool) -> LayerPart:
    count = reader.optional("n_shared_experts", 0)
    return read_experts(
        reader,
        shared_intermediate=count * reader.optional("moe_shared_expert_intermediate_size", 0),
        latent=reader.optional("moe_latent_size", 0),
        is_gated=int(is_gated),
    )


def _nemotron_nas(reader: ConfigReader) -> Fields:
    """Read models of a search: each layer's half may be left out or have a width of its own."""
    num_layers, hidden = reader.integer("num_hidden_layers"), reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    reader.require("mlp_bias", default=False, allowed=False)
    reader.ignore("num_key_value_heads", "intermediate_size")
    blocks = reader.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != num_layers:
        reader.refuse("block_configs", f"expected one for each of the {num_layers} layers")
        blocks = []
    halves: list[Halves] = []
    for index, block in enumerate(blocks):
        content = block if isinstance(block, Mapping) else {}
        mixer, half = (ConfigReader(_mapping(content, key)) for key in ("attention", "ffn"))
        attention = None
        if not mixer.flag("no_op", default=False):
            groups = num_heads // mixer.integer("n_heads_in_group")
            attention = read_attention(reader, num_kv_heads=max(1, groups))
        width = _ffn_width(half.get("ffn_mult"), hidden)
        is_left_out = half.flag("no_op", default=False)
        halves.append((attention, None if is_left_out or not width else mlp_of(width)))
        for part in (mixer, half):
            part.ignore("unshifted_sink")
            part.refuse_unread("nemotron-nas")
            for violation in part.violations:
                reader.refuse(
                    f"block_configs[{index}]", f"{violation.field}: {violation.description}"
                )
    return {**read_trunk(reader), **compose(halves or [(read_attention(reader), None)])}


def _mapping(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


# What the width of a feed-forward half is rounded up to.
# Source: DeciLM's modelling file (`_ffn_mult_to_intermediate_size`).
_WIDTH_STEP = 256


def _ffn_width(multiple: object, hidden: int) -> int:
    if not isinstance(multiple, int | float):
        return 0
    return -(-int(2 * multiple * hidden / 3) // _WIDTH_STEP) * _WIDTH_STEP


RECURRENT: Mapping[str, Callable[[ConfigReader], Fields]] = {
    **HYBRIDS,
    "granitemoehybrid": _granite_hybrid,
    "kimi_linear": _kimi_linear,
    "nemotron-nas": _nemotron_nas,
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_5,
}
