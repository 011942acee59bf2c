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
from foretoken.domain.models.layer import LayerPart


def _sparse_latent(reader: ConfigReader, gate: int = 0) -> Fields:
    """Read DeepSeek V3.2 and GLM-5, and what A.X K2 and Hy 4 have of them."""
    num_layers = reader.integer("num_hidden_layers")
    dims = {**latent_dims(reader), **index_dims(reader), "has_gate": gate}
    part = LayerPart(kind="sparse_latent", dims=dims)
    types = reader.names("indexer_types", num_layers, ("full", "shared")) or ["full"] * num_layers
    # What `indexer_types` spells out; layers of a type of their own there are none.
    reader.ignore("index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    reader.require("mlp_bias", default=False, allowed=False)
    kinds = ("full_attention", "deepseek_sparse_attention", "indexed_attention")
    reader.names("layer_types", num_layers, kinds)
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


SPARSE: Mapping[str, Callable[[ConfigReader], Fields]] = {
    "axk2": _axk2,
    "deepseek_v32": _sparse_latent,
    "glm_moe_dsa": _sparse_latent,
    "hy_v4": _hy_v4,
}
