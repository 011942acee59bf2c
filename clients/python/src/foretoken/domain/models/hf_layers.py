"""Hugging Face files of models whose attention differs between layers, or is none of all heads.

Each model type is one function of `LAYERED` that says which keys it has and what they mean.
Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping, Sequence

from foretoken.domain.models.hf_parts import (
    Fields,
    compose,
    dense_first,
    index_dims,
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


def _latent(reader: ConfigReader) -> Fields:
    """Read what has latent attention as DeepSeek V3, and dense layers in places of their own."""
    part = LayerPart(kind="latent", dims=latent_dims(reader))
    dense = mlp_of(reader.integer("intermediate_size"))
    # Factors of embeddings and residuals, and how embeddings are initialised.
    reader.ignore("scale_emb", "scale_depth", "dim_model_base", "embedding_initializer_range")
    reader.require("mlp_bias", default=False, allowed=False)
    halves = [dense] * reader.integer("num_hidden_layers")
    if reader.has("n_routed_experts"):
        experts = read_experts(reader, shared_intermediate=shared_width(reader))
        halves = dense_first(reader, dense, experts)
    return {
        **read_trunk(reader),
        **compose([(part, half) for half in halves]),
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _longcat(reader: ConfigReader) -> Fields:
    """Read LongCat-Flash: twice attention and a dense half, with experts next to the second.

    They run in a row here, with a norm more; an engine may run them at the same time.
    """
    reader.rename(
        {
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "expert_ffn_hidden_size": "moe_intermediate_size",
            "moe_topk": "num_experts_per_tok",
        }
    )
    reader.require("attention_method", default="MLA", allowed="MLA")
    reader.require("zero_expert_type", default="identity", allowed="identity")
    reader.ignore("mla_scale_q_lora", "mla_scale_kv_lora")
    part = LayerPart(kind="latent", dims=latent_dims(reader))
    sublayer = (part, mlp_of(reader.integer("intermediate_size")))
    experts = read_experts(reader, num_null_experts=reader.optional("zero_expert_num", 0))
    layer = [sublayer, (None, experts), sublayer]
    return {**read_trunk(reader), **compose(layer * reader.integer("num_hidden_layers"))}


def _dbrx(reader: ConfigReader) -> Fields:
    """Read DBRX, which has its attention and its experts in sections of their own."""
    reader.rename(
        {
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        }
    )
    reader.ignore("emb_pdrop")
    attn, ffn = reader.section("attn_config"), reader.section("ffn_config")
    attn.ignore("clip_qkv", "attn_pdrop")
    attention = read_attention(reader, num_kv_heads=attn.integer("kv_n_heads"))
    ffn.ignore("ffn_act_fn", "moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment")
    ffn.ignore("moe_normalize_expert_weights", "hidden_size")
    dims = {
        "num_experts": ffn.integer("moe_num_experts"),
        "top_k": ffn.integer("moe_top_k"),
        "intermediate": ffn.integer("ffn_hidden_size"),
    }
    experts = LayerPart(kind="experts", dims=dims)
    layers = [(attention, experts)] * reader.integer("num_hidden_layers")
    return {**read_trunk(reader), "norm": "layer_norm", **compose(layers)}


def _laguna(reader: ConfigReader) -> Fields:
    """Read Laguna, whose layers have heads of their own, some of them in windows."""
    num_layers = reader.integer("num_hidden_layers")
    kinds = ("full_attention", "sliding_attention")
    types = reader.names("layer_types", num_layers, kinds) or ["full_attention"] * num_layers
    gating = reader.get("gating")
    reader.ignore("moe_apply_router_weight_on_input", "moe_router_logit_softcapping")
    reader.ignore("moe_routed_scaling_factor")
    full = read_attention(reader, qk_norm=1, gate=2 if gating in (None, True, "per-head") else 1)
    heads = reader.numbers("num_attention_heads_per_layer", num_layers)
    window = reader.optional("sliding_window", 0)
    mixers = [
        full.changed(num_heads=count, window=window if kind == "sliding_attention" else 0)
        for count, kind in zip(heads or [full["num_heads"]] * num_layers, types, strict=True)
    ]
    shared = reader.optional("shared_expert_intermediate_size", 0)
    experts = read_experts(reader, shared_intermediate=shared)
    halves = dense_first(reader, mlp_of(reader.integer("intermediate_size")), experts)
    return {**read_trunk(reader), **compose(list(zip(mixers, halves, strict=True)))}


def _deepseek_v4(reader: ConfigReader) -> Fields:
    num_layers = reader.integer("num_hidden_layers")
    reader.require("num_key_value_heads", default=1, allowed=1)
    reader.require("attention_bias", default=False, allowed=False)
    # The first layers pick experts by the token alone: the same work without a router's sort.
    reader.ignore("num_hash_layers")
    reader.names("mlp_layer_types", num_layers, ("hash_moe", "moe"))
    dims = {
        "num_heads": reader.integer("num_attention_heads"),
        "head_dim": reader.integer("head_dim"),
        "qk_rope_head_dim": reader.integer("qk_rope_head_dim"),
        "q_lora_rank": reader.integer("q_lora_rank"),
        "o_lora_rank": reader.integer("o_lora_rank"),
        "o_groups": reader.integer("o_groups"),
        "window": reader.integer("sliding_window"),
        **index_dims(reader),
    }
    # The list has an entry for each prediction head as well.
    ratios = reader.numbers("compress_ratios", num_layers) or _ratios_by_type(reader, num_layers)
    mixer = LayerPart(kind="compressed", dims=dims)
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    streams = LayerPart(
        kind="hyper_connections",
        dims={
            "num_streams": reader.integer("hc_mult"),
            "num_sinkhorn": reader.optional("hc_sinkhorn_iters", 20),
        },
    )
    return {
        **read_trunk(reader),
        **compose([(mixer.changed(compress_ratio=max(ratio, 0)), experts) for ratio in ratios]),
        "extras": (streams, *prediction_heads(reader, "num_nextn_predict_layers")),
    }


def _ratios_by_type(reader: ConfigReader, num_layers: int) -> list[int]:
    """Return how many tokens each layer makes one of (0: none), as files of transformers 5 say."""
    rates = reader.section("compress_rates")
    by_type = {
        kind: rates.optional(kind, 0)
        for kind in ("compressed_sparse_attention", "heavily_compressed_attention")
    }
    types = reader.names("layer_types", num_layers, (*by_type, "sliding_attention"))
    return [by_type.get(kind, 0) for kind in types or [""] * num_layers]


def _minimax_m2(reader: ConfigReader) -> Fields:
    num_layers = reader.integer("num_hidden_layers")
    if set(reader.numbers("attn_type_list", num_layers) or [1]) != {1}:
        reader.refuse("attn_type_list", "only softmax attention (1) is supported")
    is_normed = reader.flag("use_qk_norm", default=True)
    by_head = reader.get("qk_norm_type") == "per_head"
    mixer = read_attention(reader, qk_norm=is_normed * (1 if by_head else 2))
    experts = read_experts(
        reader,
        intermediate=reader.integer("intermediate_size"),
        shared_intermediate=reader.optional("shared_intermediate_size", 0),
        has_fp32_router=1,
    )
    reader.ignore("mtp_transformer_layers", "use_mtp")
    return {
        **read_trunk(reader),
        **compose([(mixer, experts)] * num_layers),
        "extras": prediction_heads(reader, "num_mtp_modules"),
    }


def _minimax_m3(reader: ConfigReader) -> Fields:
    num_layers = reader.integer("num_hidden_layers")
    reader.require("attention_output_gate", default=False, allowed=False)
    reader.require("qk_norm_type", default="per_head", allowed="per_head")
    attention = read_attention(reader, qk_norm=int(reader.flag("use_qk_norm", default=True)))
    sparse = reader.section("sparse_attention_config")
    # Values of the indexer, the blocks that are always seen and the score of one: no operator more.
    sparse.ignore(
        *("sparse_disable_index_value", "sparse_score_type", "sparse_init_block"),
        *("sparse_local_block", "use_sparse_attention"),
    )
    picked = LayerPart(
        kind="block_sparse",
        dims={
            **{name: attention[name] for name in ("num_heads", "num_kv_heads", "head_dim")},
            "index_heads": sparse.integer("sparse_num_index_heads"),
            "index_head_dim": sparse.integer("sparse_index_dim"),
            "index_topk": sparse.integer("sparse_topk_blocks"),
            "block_size": sparse.integer("sparse_block_size"),
        },
    )
    flags = sparse.numbers("sparse_attention_freq", num_layers) or [1] * num_layers
    shared = reader.optional("shared_intermediate_size", 0) or shared_width(reader)
    reader.ignore("n_shared_experts", "moe_intermediate_size")
    experts = read_experts(
        reader, intermediate=reader.integer("intermediate_size"), shared_intermediate=shared
    )
    halves = dense_first(reader, mlp_of(reader.integer("dense_intermediate_size")), experts)
    mixers = [picked if flag else attention for flag in flags]
    heads = prediction_heads(reader, "num_nextn_predict_layers", "num_mtp_modules")
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": heads,
    }


def _gemma4(reader: ConfigReader) -> Fields:
    num_layers = reader.integer("num_hidden_layers")
    types = ("full_attention", "sliding_attention")
    sees_all = layers_of(reader, *types, unlisted=[False] * num_layers)
    windowed = read_attention(reader, qk_norm=1, window=reader.integer("sliding_window"))
    own = _own_dims(reader, [place for place, is_full in enumerate(sees_all) if is_full])
    head_dim = reader.optional("global_head_dim", own.optional("head_dim", windowed["head_dim"]))
    num_kv_heads = reader.optional(
        "num_global_key_value_heads", own.optional("num_key_value_heads", windowed["num_kv_heads"])
    )
    is_key = int(reader.flag("attention_k_eq_v", default=False))
    full = windowed.changed(
        window=0, head_dim=head_dim, num_kv_heads=num_kv_heads, has_value_of_key=is_key
    )
    half = mlp_of(reader.integer("intermediate_size"))
    wide = 2 if reader.flag("use_double_wide_mlp", default=False) else 1
    shared_half = half.changed(intermediate=wide * half["intermediate"])
    if reader.flag("enable_moe_block", default=False):
        # A dense network runs with the experts: one that all tokens share.
        half = shared_half = read_experts(reader, shared_intermediate=half["intermediate"])
    extras: tuple[LayerPart, ...] = ()
    width = reader.optional("hidden_size_per_layer_input", 0)
    vocab = reader.optional("vocab_size_per_layer_input", 1)
    if width > 0:
        dims = {"vocab": vocab, "width": width}
        extras = (LayerPart(kind="layer_embeddings", dims=dims),)
    mixers = [full if is_full else windowed for is_full in sees_all]
    # The last layers have the keys and values of earlier ones that see as much.
    first = num_layers - min(reader.optional("num_kv_shared_layers", 0), num_layers)
    shared = [(mixer.changed(has_shared_kv=1), shared_half) for mixer in mixers[first:]]
    return {
        **read_trunk(reader),
        "has_tied_embedding": reader.flag("tie_word_embeddings", default=True),
        **compose([*((mixer, half) for mixer in mixers[:first]), *shared]),
        "extras": extras,
    }


def _own_dims(reader: ConfigReader, places: Sequence[int]) -> ConfigReader:
    """Return what `per_layer_config` says of layers, which have to be alike; nothing without it."""
    layers = reader.section("per_layer_config")
    named = {int(key): key for key in layers.keys if key.isdecimal()}
    found = [layers.get(key) for key in named.values()]
    if named and (sorted(named) != list(places) or any(one != found[0] for one in found)):
        reader.refuse("per_layer_config", "must name the layers of full attention, all alike")
    return layers.section(next(iter(named.values()), "0"))


def _llama4(reader: ConfigReader) -> Fields:
    num_layers = reader.integer("num_hidden_layers")
    # The layers that turn by position see their own chunk, which is said again here.
    reader.names("layer_types", num_layers, ("chunked_attention", "full_attention"))
    interval = reader.optional("no_rope_layer_interval", 4)
    has_rope = (
        reader.numbers("no_rope_layers", num_layers) if reader.get("no_rope_layers") else None
    )
    if has_rope is None:
        has_rope = [int(not is_full) for is_full in every_nth(num_layers, interval)]
    attention = read_attention(reader, chunk=reader.optional("attention_chunk_size", 0))
    # The norm of queries and keys has no weights.
    reader.flag("use_qk_norm", default=True)
    width, step = reader.integer("intermediate_size"), reader.integer("interleave_moe_layer_step")
    experts = read_experts(reader, intermediate=width, shared_intermediate=width)
    dense = mlp_of(reader.optional("intermediate_size_mlp", width))
    routed = reader.get("moe_layers")
    if not isinstance(routed, list):
        routed = range(step - 1, num_layers, step)
    full = attention.changed(chunk=0, has_rope=0)
    halves = [experts if layer in routed else dense for layer in range(num_layers)]
    mixers = [attention if flag else full for flag in has_rope]
    return {**read_trunk(reader), **compose(list(zip(mixers, halves, strict=True)))}


def _step3p7(reader: ConfigReader) -> Fields:
    num_layers = reader.integer("num_hidden_layers")
    types = ("sliding_attention", "full_attention")
    is_windowed = layers_of(reader, *types, unlisted=[False] * num_layers)
    # Each head's output has a gate.
    full = read_attention(reader, qk_norm=1, gate=2)
    windowed = full.changed(window=reader.integer("sliding_window"))
    shared = reader.optional("share_expert_dim", 0)
    reader.ignore("n_shared_experts")
    is_fp32 = int(reader.flag("need_fp32_gate", default=True))
    experts = read_experts(reader, shared_intermediate=shared, has_fp32_router=is_fp32)
    halves = dense_first(reader, mlp_of(reader.integer("intermediate_size")), experts)
    mixers = [windowed if flag else full for flag in is_windowed]
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _mimo_v2(reader: ConfigReader) -> Fields:
    """Read MiMo-V2-Flash; files of transformers 5.24 leave out what its class says of windows."""
    num_layers = reader.integer("num_hidden_layers")
    types = reader.names("layer_types", num_layers, ("full_attention", "sliding_attention"))
    window = reader.integer("sliding_window", "sliding_window_size")
    reader.ignore("sliding_window_size", "attention_chunk_size")
    full = read_attention(
        reader,
        v_head_dim=reader.optional("v_head_dim", 0),
        has_sinks=int(reader.flag("add_full_attention_sink_bias", default=False)),
    )
    windowed = full.changed(
        num_heads=reader.optional("swa_num_attention_heads", full["num_heads"]),
        num_kv_heads=reader.optional("swa_num_key_value_heads", 2 * full["num_kv_heads"]),
        head_dim=reader.optional("swa_head_dim", full["head_dim"]),
        v_head_dim=reader.optional("swa_v_head_dim", full["v_head_dim"]),
        has_sinks=int(reader.flag("add_swa_attention_sink_bias", default=bool(types))),
        window=window,
    )
    flags = reader.numbers("hybrid_layer_pattern", num_layers) or [0] * num_layers
    if types:
        flags = [int(kind == "sliding_attention") for kind in types]
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    halves = dense_first(reader, mlp_of(reader.integer("intermediate_size")), experts)
    mixers = [windowed if flag else full for flag in flags]
    return {**read_trunk(reader), **compose(list(zip(mixers, halves, strict=True)))}


LAYERED: Mapping[str, Callable[[ConfigReader], Fields]] = {
    "axk1": _latent,
    "dbrx": _dbrx,
    "deepseek_ref": _deepseek_v4,
    "deepseek_v4": _deepseek_v4,
    "gemma4_text": _gemma4,
    "glm4_moe_lite": _latent,
    "laguna": _laguna,
    "llama4_text": _llama4,
    "longcat_flash": _longcat,
    "mimo_v2_flash": _mimo_v2,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "minicpm3": _latent,
    "mistral4": _latent,
    "sarvam_mla": _latent,
    "step3p7": _step3p7,
    "youtu": _latent,
}
