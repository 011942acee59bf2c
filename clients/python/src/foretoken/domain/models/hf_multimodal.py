"""Hugging Face files of models that also see: a text model in `text_config`, and encoders.

Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping
from functools import partial

from foretoken.domain.models.hf_decoders import DECODERS, Fields, read_qwen3, read_qwen3_moe
from foretoken.domain.models.hf_layers import LAYERED
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.hf_recurrent import RECURRENT
from foretoken.domain.models.layer import LayerPart

# What these files call a text model that others have too.
_TEXT = {
    **DECODERS,
    **LAYERED,
    **RECURRENT,
    "qwen3_vl_text": read_qwen3,
    "qwen3_vl_moe_text": read_qwen3_moe,
}
# The text model of a file by its type, where `text_config` does not say it.
_TYPES = {
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


def _read(model_type: str, reader: ConfigReader) -> Fields:
    text = reader.section("text_config")
    text_type = text.get("model_type") or _TYPES[model_type]
    if text_type not in _TEXT:
        text.refuse("model_type", f"{text_type!r} is none of {', '.join(sorted(_TEXT))}")
        text_type = _TYPES[model_type]
    fields = _TEXT[text_type](text)
    vision = reader.get("vision_config")
    extras = fields.get("extras", ())
    if vision:
        extras = (*extras, _encoder(reader, vision))
    is_tied = reader.flag("tie_word_embeddings", default=fields["has_tied_embedding"])
    return {**fields, "has_tied_embedding": is_tied, "extras": extras}


def _encoder(outer: ConfigReader, config: object) -> LayerPart:
    """Return the encoder of images; its keys go by the names of many families."""
    if not isinstance(config, Mapping):
        outer.refuse("vision_config", f"expected an object, found {config!r:.80}")
        config = {}
    # What it computes is in these keys; further ones, such as norms' epsilons, change no operator.
    vision = ConfigReader(config)
    hidden = vision.integer("vt_hidden_size", "hidden_size")
    patch, merge = vision.integer("patch_size"), vision.get("merge_kernel_size")
    compression = vision.get("img_token_compression_config")
    inner = ConfigReader(compression if isinstance(compression, Mapping) else config)
    merged = inner.optional("spatial_merge_size", 1) ** 2
    if isinstance(merge, list) and all(isinstance(side, int) for side in merge):
        merged = merge[0] * merge[-1]
    depth = inner.optional("temporal_patch_size", 1)
    channels = vision.optional("in_channels", 0) or vision.optional("num_channels", 3)
    height, width = (vision.optional(f"init_pos_emb_{side}", 0) for side in ("height", "width"))
    positions = vision.optional("num_position_embeddings", height * width)
    inner_layers = vision.get("deepstack_visual_indexes")
    has_no_bias = vision.get("attn_bias") is False or vision.get("attention_bias") is False
    is_gemma = vision.get("model_type") == "gemma4_vision"
    pooled = vision.optional("pooling_kernel_size", 1) ** 2
    dims = {
        "num_layers": vision.integer("vt_num_hidden_layers", "depth", "num_hidden_layers"),
        "hidden": hidden,
        "num_heads": vision.integer("vt_num_attention_heads", "num_heads", "num_attention_heads"),
        "intermediate": vision.integer("vt_intermediate_size", "intermediate_size"),
        "attention_width": vision.optional("qkv_hidden_size", 0),
        "is_gated": int(is_gemma),
        "has_bias": int(not has_no_bias),
        "patch_features": channels * patch**2 * depth,
        # Gemma's are a table for each of both directions.
        "num_positions": 2 * vision.optional("position_embedding_size", 0) or positions,
        "projector_in": hidden * merged,
        "projector_intermediate": 0 if is_gemma else hidden * merged,
        "num_projectors": 1 + len(inner_layers if isinstance(inner_layers, list) else ()),
        "patch_side": patch,
        "merged_patches": merged * pooled,
        "max_image_tokens": vision.optional("default_output_length", 0),
    }
    for violation in (*vision.violations, *inner.violations):
        outer.refuse(f"vision_config.{violation.field}", violation.description)
    return LayerPart(kind="encoder", dims=dims)


MULTIMODAL: Mapping[str, Callable[[ConfigReader], Fields]] = {
    model_type: partial(_read, model_type) for model_type in _TYPES
}
