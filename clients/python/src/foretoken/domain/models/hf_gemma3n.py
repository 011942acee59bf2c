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
# MobileNet-V5 (300M), counted in timm 1.0.31 at the 768 by 768 pixels that its processor makes.
_MOBILENET = "mobilenetv5_300m_enc"
_NUM_WEIGHTS, _NUM_PRODUCTS, _TOKENS_OF_IMAGE = 294_126_912, 435_741_474_816, 256
# Features of a frame of sound, which both convolutions before the encoder halve.
_MEL_BINS, _SAMPLED_DOWN = 128, 4
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


def read_gemma3n_seeing(reader: ConfigReader) -> Fields:
    """Read a file of Gemma 3n with what it sees and hears with."""
    fields = read_gemma3n(reader.section("text_config"))
    # Tables of what follows an image or a sound are of a hundred rows: they do not count.
    reader.ignore("audio_soft_tokens_per_image")
    extras = fields["extras"]
    if reader.has("vision_config"):
        extras = (*extras, _mobilenet(reader))
    if reader.has("audio_config"):
        extras = (*extras, _conformer(reader))
    is_tied = reader.flag("tie_word_embeddings", default=fields["has_tied_embedding"])
    return {**fields, "has_tied_embedding": is_tied, "extras": extras}


def _mobilenet(reader: ConfigReader) -> LayerPart:
    vision = reader.part("vision_config")
    if vision.get("architecture", _MOBILENET) != _MOBILENET:
        reader.refuse("vision_config.architecture", f"only {_MOBILENET} is known")
    return LayerPart(
        kind="summed_encoder",
        dims={
            "num_weights": _NUM_WEIGHTS,
            "repeats": round(_NUM_PRODUCTS / _NUM_WEIGHTS),
            "projected": vision.optional("hidden_size", 2048),
            "num_tokens": reader.optional("vision_soft_tokens_per_image", _TOKENS_OF_IMAGE),
        },
    )


def _conformer(reader: ConfigReader) -> LayerPart:
    """Return the encoder of sound: a conformer, of whose frames every fourth becomes a token."""
    sound = reader.part("audio_config")
    channels = sound.numbers("sscp_conv_channel_size", 2) or [128, 32]
    chunk = sound.optional("conf_attention_chunk_size", 12)
    left = sound.optional("conf_attention_context_left", 13)
    right = sound.optional("conf_attention_context_right", 0)
    bins = sound.optional("input_feat_size", _MEL_BINS)
    return LayerPart(
        kind="audio_encoder",
        dims={
            "num_layers": sound.optional("conf_num_hidden_layers", 12),
            "hidden": sound.optional("hidden_size", 1536),
            "num_heads": sound.optional("conf_num_attention_heads", 8),
            "chunk": chunk,
            "context": chunk + left - 1 + right,
            "conv_kernel": sound.optional("conf_conv_kernel_size", 5),
            "sampled_features": channels[1] * bins // _SAMPLED_DOWN,
            "output": 0,
            "query_window": sound.optional("conf_reduction_factor", 4),
        },
    )
