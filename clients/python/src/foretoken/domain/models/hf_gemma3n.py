"""Hugging Face files of Gemma 3n: several streams of the residual, and embeddings for each layer.

Source: its configuration and modelling files in transformers 5.
"""

from foretoken.domain.models.hf_parts import (
    Fields,
    compose,
    layers_of,
    mlp_of,
    read_attention,
    read_trunk,
)
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth

# What `Gemma3nTextConfig` takes for keys that are left out.
_DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
# Every so many layers one sees all tokens.
_PERIOD = 5


def read_gemma3n(reader: ConfigReader) -> Fields:
    """Read Gemma 3n.

    The share of its activations that the first layers set to zero saves no time in engines: their
    products are dense. Norms behind halves of layers are not counted.
    """
    reader.assume(_DEFAULTS)
    num_layers = reader.integer("num_hidden_layers")
    # The stream that a layer computes, limits and scales of its mixtures, shares of zeros.
    reader.ignore("altup_active_idx", "altup_coef_clip", "altup_correct_scale")
    reader.ignore("activation_sparsity_pattern")
    by_period = every_nth(num_layers, _PERIOD)
    sees_all = layers_of(reader, "full_attention", "sliding_attention", by_period)
    windowed = read_attention(reader, qk_norm=1, window=reader.integer("sliding_window"))
    full = windowed.changed(window=0)
    first = num_layers - min(reader.optional("num_kv_shared_layers", 0), num_layers)
    mixers = [
        (full if is_full else windowed).changed(has_shared_kv=int(layer >= first))
        for layer, is_full in enumerate(sees_all)
    ]
    if isinstance(reader.get("intermediate_size"), list):
        widths = reader.numbers("intermediate_size", num_layers) or [1] * num_layers
    else:
        widths = [reader.integer("intermediate_size")] * num_layers
    halves = [mlp_of(max(width, 1)) for width in widths]
    streams = {"num_streams": reader.integer("altup_num_inputs")}
    embeddings = {
        "vocab": reader.integer("vocab_size_per_layer_input"),
        "width": reader.integer("hidden_size_per_layer_input"),
    }
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": (
            LayerPart(kind="layer_embeddings", dims=embeddings),
            LayerPart(kind="laurel", dims={"rank": reader.integer("laurel_rank")}),
            LayerPart(kind="alternating_updates", dims=streams),
        ),
    }
