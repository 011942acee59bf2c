"""Hugging Face files of models whose latent attention sees what an indexer picks.

Each model type is one function of `SPARSE` that says which keys it has and what they mean.
Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping

from foretoken.domain.models.hf_parts import (
    Fields,
    compose,
    dense_first,
    index_dims,
    latent_dims,
    mlp_of,
    prediction_heads,
    read_experts,
    read_trunk,
    shared_width,
)
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth

# What files call layers that see what an indexer picks.
_SEES_PICKED = ("full_attention", "deepseek_sparse_attention", "indexed_attention")


def _sparse_latent(reader: ConfigReader, gate: int = 0) -> Fields:
    """Read DeepSeek V3.2 and GLM-5, and what A.X K2 and Hy 4 have of them."""
    num_layers = reader.integer("num_hidden_layers")
    dims = {**latent_dims(reader), **index_dims(reader), "has_gate": gate}
    part = LayerPart(kind="sparse_latent", dims=dims)
    types = reader.names("indexer_types", num_layers, ("full", "shared")) or ["full"] * num_layers
    # What `indexer_types` spells out; layers of a type of their own there are none.
    reader.ignore("index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    reader.require("mlp_bias", default=False, allowed=False)
    reader.names("layer_types", num_layers, _SEES_PICKED)
    dense = mlp_of(reader.integer("intermediate_size"))
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    mixers = [part if kind == "full" else part.changed(has_indexer=0) for kind in types]
    halves = dense_first(reader, dense, experts)
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": prediction_heads(reader, "num_nextn_predict_layers"),
    }


def _axk2(reader: ConfigReader) -> Fields:
    """Read A.X K2: gates from the query's product, and norms with gates of their own."""
    reader.assume({"first_k_dense_replace": 1, "gated_norm_rank": 16})
    fields = _sparse_latent(reader, gate=2)
    types = reader.get("mlp_layer_types") or []
    num_dense = reader.integer("first_k_dense_replace")
    if types:
        num_dense = sum(kind == "dense" for kind in types)
        if "sparse" in types[:num_dense]:
            reader.refuse("mlp_layer_types", "only the first layers can be dense")
    dims = {"rank": reader.integer("gated_norm_rank"), "num_dense": num_dense}
    norms = LayerPart(kind="gated_norms", dims=dims)
    return {**fields, "extras": (*fields["extras"], norms)}


def _hy_v4(reader: ConfigReader) -> Fields:
    """Read Hy 4: gates of their own projection, and streams of the residual that do not mix.

    A learned logit for each head is not counted.
    """
    num_layers = reader.integer("num_hidden_layers")
    every_fourth = [
        "full" if layer % 4 == 1 or not layer else "shared" for layer in range(num_layers)
    ]
    reader.assume({"first_k_dense_replace": 1, "indexer_types": every_fourth})
    fields = _sparse_latent(reader, gate=1)
    # The scale of the gate into the streams, and what logits begin with.
    reader.ignore("hc_magnitude", "learnable_sink_init")
    dims = {"num_streams": reader.optional("hc_mult", 4), "num_sinkhorn": 0}
    streams = LayerPart(kind="hyper_connections", dims=dims)
    return {**fields, "extras": (*fields["extras"], streams)}


def _glm5_next(reader: ConfigReader) -> Fields:
    """Read GLM-5.3-Flash: delta attention, and latent attention to pools in every fourth layer."""
    num_layers = reader.integer("num_hidden_layers")
    every_fourth = every_nth(num_layers, 4)
    types = reader.names("layer_types", num_layers, ("linear_attention", *_SEES_PICKED))
    is_latent = [kind in _SEES_PICKED for kind in types] if types else every_fourth
    # Files say the delta attention in a section, in keys of their own, or both.
    own = reader.section("linear_attn_config")
    own.ignore("kda_layers", "full_attn_layers", "gate_lower_bound")
    keys = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    linear = reader
    if reader.has("linear_attn_config"):
        linear, keys = own, ("num_heads", "head_dim", "short_conv_kernel_size")
    sizes = zip(("num_heads", "head_dim", "conv_kernel"), map(linear.integer, keys), strict=True)
    delta = LayerPart(kind="kda", dims=dict(sizes))
    reader.ignore("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "head_dim")
    reader.ignore("linear_lower_bound", "index_share_for_mtp_iteration", "num_key_value_heads")
    reader.ignore("index_kpool_always_select_tail", "qk_head_dim", "base_model_ep_plan")
    reader.require("qk_rope_head_dim", default=0, allowed=0)
    for key in ("mhc", "mla_use_nope", "index_kpool_compress"):
        reader.require(key, default=True, allowed=True)
    reader.names("indexer_types", num_layers, ("full",))
    ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    latent = LayerPart(
        kind="pooled_latent",
        dims={
            "num_heads": reader.integer("num_attention_heads"),
            **{name: reader.integer(name) for name in ranks},
            **index_dims(reader),
            "index_pool": reader.integer("index_kpool"),
        },
    )
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    halves = dense_first(reader, mlp_of(reader.integer("intermediate_size")), experts)
    mixers = [latent if is_picked else delta for is_picked in is_latent]
    streams = LayerPart(
        kind="hyper_connections",
        dims={
            "num_streams": reader.integer("hc_mult"),
            "num_sinkhorn": reader.optional("hc_sinkhorn_iters", 20),
            "has_head": 0,
        },
    )
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": (streams, *prediction_heads(reader, "num_nextn_predict_layers")),
    }


def _deepseek_v41(reader: ConfigReader) -> Fields:
    """Read DeepSeek-V4.1: compressed tokens that layers share, and memory of n-grams in some.

    Heads that draft a block are counted as prediction heads: layers of the model.
    """
    num_layers = reader.integer("num_hidden_layers")
    reader.require("num_key_value_heads", default=1, allowed=1)
    reader.require("attention_bias", default=False, allowed=False)
    # Of how ids are hashed, and of the heads that draft.
    reader.ignore("engram_pad_token_id", "engram_compressed_vocab_size", "engram_vocab_size")
    reader.ignore(*(key for key in reader.keys if key.startswith("dspark_")))
    sizes = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups")
    dims = {
        "num_heads": reader.integer("num_attention_heads"),
        **{name: reader.integer(name) for name in sizes},
        "window": reader.integer("sliding_window"),
        **index_dims(reader),
    }
    ratios = reader.numbers("compress_ratios", num_layers) or [0] * num_layers
    owners = reader.get("kv_source_layer_ids") or []
    indexers = reader.get("index_source_layer_ids") or []
    first = reader.optional("candidate_source_layer_id", num_layers)
    candidates = reader.optional("candidate_topk_blocks", 0)
    candidates *= reader.optional("candidate_block_size", 1)
    mixer = LayerPart(kind="shared_compressed", dims={**dims, "compress_ratio": 0})
    mixers = [
        mixer.changed(
            compress_ratio=max(ratio, 0),
            has_entries=int(layer in owners),
            has_indexer=int(layer in indexers),
            candidates=candidates * (layer > first and layer in indexers),
        )
        for layer, ratio in enumerate(ratios)
    ]
    experts = read_experts(reader, shared_intermediate=shared_width(reader))
    num_streams = reader.integer("hc_mult")
    streams = {
        "num_streams": num_streams,
        "num_sinkhorn": reader.optional("hc_sinkhorn_iters", 20),
        "has_head": 0,
    }
    extras: list[LayerPart] = [LayerPart(kind="hyper_connections", dims=streams)]
    layers = reader.get("engram_layer_ids") or []
    rows = reader.numbers("engram_num_embeddings", len(layers)) or []
    if layers:
        columns = (reader.integer("engram_max_ngram_size") - 1) * reader.integer("engram_n_heads")
        memory = {
            "num_layers": len(layers),
            "rows": sum(rows),
            "width": reader.integer("engram_head_dim"),
            "columns": columns,
            "num_streams": num_streams,
        }
        extras.append(LayerPart(kind="engram", dims=memory))
    return {
        **read_trunk(reader),
        **compose([(mixer, experts) for mixer in mixers]),
        "extras": (*extras, *prediction_heads(reader, "num_nextn_predict_layers")),
    }


SPARSE: Mapping[str, Callable[[ConfigReader], Fields]] = {
    "axk2": _axk2,
    "deepseek_v32": _sparse_latent,
    "deepseek_v41_text": _deepseek_v41,
    "glm5_next_text": _glm5_next,
    "glm_moe_dsa": _sparse_latent,
    "hy_v4": _hy_v4,
}
