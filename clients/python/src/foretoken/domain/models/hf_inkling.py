"""Hugging Face files of Inkling: attention with a bias by distance, and short convolutions.

Source: its configuration and modelling files in transformers 5.
"""

from foretoken.domain.models.hf_parts import (
    Fields,
    compose,
    dense_first,
    layers_of,
    mlp_of,
    prediction_heads,
    read_attention,
    read_experts,
    read_trunk,
)
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth

# What `InklingTextConfig` takes for keys that are left out.
_DEFAULTS = {
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "conv_kernel_size": 4,
    "n_shared_experts": 2,
    "max_position_embeddings": 131072,
}
# Every so many layers one sees all tokens.
_PERIOD = 6


def read_inkling(reader: ConfigReader) -> Fields:
    """Read Inkling's text model."""
    reader.rename({"model_max_length": "max_position_embeddings"})
    reader.rename(
        {"sconv_kernel_size": "conv_kernel_size", "dense_mlp_idx": "first_k_dense_replace"}
    )
    if reader.has("dense_intermediate_size"):
        # Then the other width is that of experts.
        reader.rename({"intermediate_size": "moe_intermediate_size"})
        reader.rename({"dense_intermediate_size": "intermediate_size"})
    reader.assume(_DEFAULTS)
    num_layers = reader.integer("num_hidden_layers")
    # Rows of the head that are no padding, factors and limits, and what heads of prediction add.
    reader.ignore("unpadded_vocab_size", "log_scaling_n_floor", "log_scaling_alpha", "route_scale")
    reader.ignore("logits_mup_width_multiplier", "rms_norm_eps_moe_gate", "number_of_conv_states")
    reader.ignore("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids")
    reader.require("shared_expert_sink", default=True, allowed=True)
    local = reader.get("local_layer_ids")
    by_file = every_nth(num_layers, _PERIOD)
    if isinstance(local, list):
        by_file = [layer not in local for layer in range(num_layers)]
    sees_all = layers_of(reader, "hybrid", "hybrid_sliding", by_file)
    full = _attention(reader)
    window = reader.integer("sliding_window_size")
    windowed = full.changed(
        window=window,
        max_distance=window,
        num_heads=reader.integer("swa_num_attention_heads"),
        num_kv_heads=reader.integer("swa_num_key_value_heads"),
        head_dim=reader.integer("swa_head_dim"),
    )
    shared = reader.optional("n_shared_experts", 0)
    width = shared * reader.integer("moe_intermediate_size")
    experts = read_experts(reader, shared_intermediate=width, has_shared_gate=shared)
    halves = dense_first(reader, mlp_of(reader.optional("intermediate_size", 1)), experts)
    mixers = [full if is_full else windowed for is_full in sees_all]
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": prediction_heads(reader, "num_mtp_layers"),
    }


def _attention(reader: ConfigReader) -> LayerPart:
    """Return the attention of layers that see all tokens."""
    dims = {
        **read_attention(reader, qk_norm=1, has_rope=0).dims,
        "hidden": reader.integer("hidden_size"),
        "distance_dim": reader.integer("d_rel"),
        "max_distance": reader.integer("rel_extent"),
        "conv_kernel": reader.integer("conv_kernel_size"),
    }
    return LayerPart(kind="relative_attention", dims=dims)
