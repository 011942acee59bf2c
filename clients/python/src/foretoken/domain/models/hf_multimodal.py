"""Hugging Face files of models that also see: a text model in `text_config`, and encoders.

Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from foretoken.domain.models.hf_decoders import DECODERS, read_qwen3, read_qwen3_moe
from foretoken.domain.models.hf_gemma3n import read_gemma3n, read_gemma3n_seeing
from foretoken.domain.models.hf_grouped import GROUPED
from foretoken.domain.models.hf_inkling import read_inkling, read_inkling_seeing
from foretoken.domain.models.hf_layers import LAYERED
from foretoken.domain.models.hf_parts import Fields
from foretoken.domain.models.hf_phi4mm import read_phi4mm
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.hf_recurrent import RECURRENT
from foretoken.domain.models.hf_sparse import SPARSE
from foretoken.domain.models.hf_zamba import ZAMBA
from foretoken.domain.models.layer import LayerPart

# Every type of model of text alone.
TEXT_MODELS: Mapping[str, Callable[[ConfigReader], Fields]] = {
    **DECODERS,
    **GROUPED,
    **LAYERED,
    **RECURRENT,
    **SPARSE,
    **ZAMBA,
    "gemma3n_text": read_gemma3n,
    "inkling_text": read_inkling,
}
# What these files call a text model that others have too.
_TEXT = {
    **TEXT_MODELS,
    "gemma4_unified_text": TEXT_MODELS["gemma4_text"],
    "qwen2_5_omni_text": DECODERS["qwen2"],
    "qwen2_5_vl_text": DECODERS["qwen2"],
    "qwen2_vl_text": DECODERS["qwen2"],
    "qwen3_omni_moe_text": read_qwen3_moe,
    "qwen3_vl_text": read_qwen3,
    "qwen3_vl_moe_text": read_qwen3_moe,
}
# The text model of a file by its type, where `text_config` does not say it.
_TYPES = {
    "deepseek_v41": "deepseek_v41_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4v": "glm4v_text",
    "glm5_next": "glm5_next_text",
    "glm4v_moe": "glm4v_moe_text",
    "granite_speech": "granite",
    "gemma4_unified": "gemma4_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "minimax_m3_vl": "minimax_m3",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "voxtral": "llama",
}


# Models whose projector is as wide inside as the text model.
_INTO_TEXT = ("internvl", "internvl_chat", "llava", "llava_next", "llava_onevision")
# Those whose projector is one product.
_INTO_ONE = ("idefics3", "smolvlm")
_TILED = (*_INTO_TEXT, *_INTO_ONE, "lfm2_vl", "llama4")


def _tiled(reader: ConfigReader) -> None:
    """Take the keys of InternVL, LLaVA and others, whose images are tiles of one size."""
    reader.rename({"llm_config": "text_config", "downsample_factor": "scale_factor"})
    reader.require("projector_bias", default=True, allowed=True)
    reader.ignore("projector_use_layernorm", "max_image_tokens", "min_image_tokens", "max_tiles")
    reader.ignore("min_tiles", "tile_size", "max_pixels_tolerance", "do_image_splitting")
    reader.ignore("encoder_patch_size", "use_image_special_tokens")
    reader.ignore("dynamic_image_size", "force_image_size", "max_dynamic_patch", "ps_version")
    reader.ignore("min_dynamic_patch", "pad2square", "select_layer", "template", "use_thumbnail")
    reader.ignore("use_backbone_lora", "use_llm_lora", "image_fold", "vision_aspect_ratio")
    reader.ignore("image_processor_config")


def _of_tiles(reader: ConfigReader, encoder: LayerPart, hidden: int) -> LayerPart:
    """Return the encoder of these models: of images, or tiles of them, all of one size."""
    config, model_type = reader.get("vision_config"), reader.get("model_type")
    vision = ConfigReader(config if isinstance(config, Mapping) else {})
    side = vision.alike("image_size", 0)
    positions = vision.optional("num_patches", (side // encoder["patch_side"]) ** 2)
    # With one for the token of the whole tile.
    positions += int(model_type == "llama4")
    most = reader.optional("image_seq_length", 576) if model_type == "llava" else 0
    dims = {"num_positions": positions, "max_image_tokens": most}
    # LFM2-VL's has a width of its own.
    middle = hidden if model_type in _INTO_TEXT else reader.optional("projector_hidden_size", 0)
    middle = encoder["projector_intermediate"] if model_type == "llama4" else middle
    return encoder.changed(projector_intermediate=middle, **dims)


def _read(model_type: str, reader: ConfigReader) -> Fields:
    if model_type in _TILED:
        _tiled(reader)
    # Older files have the text model's keys among their own.
    text = reader.section("text_config") if reader.has("text_config") else reader
    if model_type in _SPEAKING:
        reader.ignore("position_id_per_seconds", "seconds_per_chunk")
        reader.ignore("hidden_size", "vocab_size")  # the text model's once more
        text.assume(_TEXT_DEFAULTS.get(model_type, {}))
    text_type = _TYPES[model_type] if text is reader else text.get("model_type")
    text_type = text_type or _TYPES[model_type]
    if text_type not in _TEXT:
        text.refuse("model_type", f"{text_type!r} is none of {', '.join(sorted(_TEXT))}")
        text_type = _TYPES[model_type]
    fields = _TEXT[text_type](text)
    vision = reader.get("vision_config")
    extras = fields.get("extras", ())
    if vision:
        encoder = _encoder(reader, vision)
        if model_type in _TILED:
            encoder = _of_tiles(reader, encoder, fields["hidden"])
        extras = (*extras, encoder)
    if sound := reader.get("audio_config"):
        kind = _speech_encoder if model_type in _SPEAKING else _audio_encoder
        extras = (*extras, kind(reader, sound))
    if model_type == "granite_speech":
        extras = (*extras, _queried_encoder(reader))
    is_tied = reader.flag("tie_word_embeddings", default=fields["has_tied_embedding"])
    return {**fields, "has_tied_embedding": is_tied, "extras": extras}


# Encoders by the model type of `vision_config`: of gated halves, without biases, and with one
# product to the model's width.
_GATED = (
    "deepseek_v41",
    "gemma4_vision",
    "glm4v",
    "glm5_next",
    "pixtral",
    "qwen2_5_omni",
    "qwen2_5_vl",
)
_WITHOUT_BIAS = ("pixtral",)
_SINGLE_PROJECTOR = ("deepseek_v41_vision", "gemma4_vision", "siglip_vision_model")
# With an adapter of two products before the one to the model's width.
_ADAPTED = ("llama4_vision_model", "muse_glimmer_vision")


def _mlp_width(vision: ConfigReader, hidden: int, family: str) -> int:
    if family.startswith("glm4v"):  # the other key is of its projector
        return vision.integer("out_hidden_size")
    if vision.has("mlp_ratio"):
        return hidden * vision.integer("mlp_ratio")
    return vision.integer("vt_intermediate_size", "intermediate_size")


def _adapter_width(outer: ConfigReader, vision: ConfigReader, merged: int) -> int:
    if outer.get("model_type") == "glm5_next":
        # After two products as wide as the model three of a gated half, as many as two of these.
        return merged + 3 * vision.integer("projection_intermediate_size") // 2
    if outer.get("model_type") != "muse_glimmer":
        return merged
    outer.ignore("out_hidden_size", "projector_hidden_act")
    return outer.integer("projector_hidden_size")


def _shuffled(outer: ConfigReader) -> int:
    """Return how many patches shuffling of pixels makes one of; 1 without it."""
    ratio = outer.get("downsample_ratio", outer.get("pixel_shuffle_ratio"))
    factor = outer.optional("scale_factor", 1)
    return round(1 / ratio) ** 2 if isinstance(ratio, float) and 0 < ratio <= 1 else factor**2


def _merged(outer: ConfigReader, vision: ConfigReader, inner: ConfigReader) -> int:
    """Return how many patches become one token; `inner` has the keys of what makes them."""
    if vision.get("model_type") == "deepseek_v41_vision":
        return vision.integer("downsample_ratio") ** 2
    merge = vision.get("merge_kernel_size")
    merged = inner.optional("spatial_merge_size", outer.optional("spatial_merge_size", 1)) ** 2
    if isinstance(merge, list) and all(isinstance(side, int) for side in merge):
        merged = merge[0] * merge[-1]
    merged *= _shuffled(inner if vision.has("pixel_shuffle_ratio") else outer)
    return int(merged * vision.optional("merge_size", 1) ** 2)


def _encoder(outer: ConfigReader, config: object) -> LayerPart:
    """Return the encoder of images; its keys go by the names of many families."""
    if not isinstance(config, Mapping):
        outer.refuse("vision_config", f"expected an object, found {config!r:.80}")
        config = {}
    # What it computes is in these keys; further ones, such as norms' epsilons, change no operator.
    vision = ConfigReader(config)
    family = str(vision.get("model_type"))
    hidden = vision.integer("vt_hidden_size", "embed_dim", "hidden_size")
    image_side, patch = vision.alike("image_size", 0), vision.alike("patch_size", 0)
    patch = vision.integer("patch_size")
    compression = vision.get("img_token_compression_config")
    inner = ConfigReader(compression if isinstance(compression, Mapping) else config)
    merged = _merged(outer, vision, inner)
    depth = inner.optional("temporal_patch_size", vision.optional("patch_temporal", 1))
    channels = vision.optional("in_channels", 0) or vision.optional("num_channels", 3)
    height, width = (
        vision.optional(f"init_pos_emb_{side}", vision.optional(f"pos_emb_{side}", 0))
        for side in ("height", "width")
    )
    positions = vision.optional("num_position_embeddings", height * width)
    inner_layers = vision.get("deepstack_visual_indexes")
    has_no_bias = vision.get("attn_bias") is False or vision.get("attention_bias") is False
    pooled = vision.optional("pooling_kernel_size", 1) ** 2
    # Images of one size, whose features are pooled to so many.
    tokens = outer.optional("mm_tokens_per_image", 0)
    if tokens > 0:
        positions = (image_side // patch) ** 2
        pooled = max(positions // tokens, 1)
    dims = {
        "num_layers": vision.integer("vt_num_hidden_layers", "depth", "num_hidden_layers"),
        "hidden": hidden,
        "num_heads": vision.integer("vt_num_attention_heads", "num_heads", "num_attention_heads"),
        "intermediate": _mlp_width(vision, hidden, family),
        "attention_width": vision.optional("qkv_hidden_size", 0),
        "is_gated": int(family.startswith(_GATED)),
        "has_bias": int(not has_no_bias and family not in _WITHOUT_BIAS),
        "patch_features": channels * patch**2 * depth,
        # Gemma's are a table for each of both directions.
        "num_positions": 2 * vision.optional("position_embedding_size", 0) or positions,
        "projector_in": hidden * merged,
        "projector_intermediate": 0
        if family in _SINGLE_PROJECTOR
        else vision.optional(
            "projector_output_dim", _adapter_width(outer, vision, hidden * merged)
        ),
        "projector_inner": int(family in _ADAPTED),
        "num_projectors": 1 + len(inner_layers if isinstance(inner_layers, list) else ()),
        "patch_side": patch,
        "merged_patches": merged * pooled,
        "max_image_tokens": vision.optional(
            "default_output_length", vision.optional("max_image_tokens", 0)
        ),
    }
    for violation in (*vision.violations, *inner.violations):
        outer.refuse(f"vision_config.{violation.field}", violation.description)
    return LayerPart(kind="encoder", dims=dims)


# Features of a frame of sound, which both convolutions before the encoder halve.
# Source: transformers 5, feature_extraction_gemma4.py (`feature_size`) and modeling_gemma4.py.
_MEL_BINS, _SAMPLED_DOWN = 128, 4


def _audio_encoder(outer: ConfigReader, config: object) -> LayerPart:
    """Return the encoder of sound; further keys change no weights."""
    if not isinstance(config, Mapping):
        outer.refuse("audio_config", f"expected an object, found {config!r:.80}")
        config = {}
    sound = ConfigReader(config)
    channels = sound.numbers("subsampling_conv_channels", 2) or [128, 32]
    hidden = sound.integer("hidden_size")
    dims = {
        "num_layers": sound.integer("num_hidden_layers"),
        "hidden": hidden,
        "num_heads": sound.optional("num_attention_heads", 8),
        "chunk": (chunk := sound.optional("attention_chunk_size", 12)),
        "context": chunk
        + sound.optional("attention_context_left", 13)
        - 1
        + sound.optional("attention_context_right", 0),
        "conv_kernel": sound.optional("conv_kernel_size", 5),
        "sampled_features": channels[1] * _MEL_BINS // _SAMPLED_DOWN,
        "output": sound.optional("output_proj_dims", hidden),
    }
    for violation in sound.violations:
        outer.refuse(f"audio_config.{violation.field}", violation.description)
    return LayerPart(kind="audio_encoder", dims=dims)


# Sound of a frame, two of whose spectra stand next to each other. Source: transformers 5,
# feature_extraction_granite_speech.py (`hop_length` 160 at 16 kHz).
_STACKED_FRAME_MS = 20


def _queried_encoder(reader: ConfigReader) -> LayerPart:
    """Return Granite Speech's conformer with the queries that make tokens of its frames.

    Of its frames are guessed letters in between, a product or two that do not count; the adapter
    that text has with sound is a workload's (`lora`).
    """
    reader.ignore("has_lora_adapter", "audio_token_index")
    sections = {name: reader.get(name) for name in ("encoder_config", "projector_config")}
    for name, found in sections.items():
        if not isinstance(found, Mapping):
            reader.refuse(name, f"expected an object, found {found!r:.80}")
            sections[name] = {}
    sound, queries = (ConfigReader(each) for each in sections.values())
    hidden, window = sound.integer("hidden_dim", "hidden_size"), reader.optional("window_size", 15)
    chunk = sound.optional("context_size", 200)
    for key, allowed in (
        ("hidden_size", hidden),
        ("encoder_hidden_size", hidden),
        ("cross_attention_frequency", 1),
    ):
        queries.require(key, default=allowed, allowed=allowed)
    dims = {
        "num_layers": sound.integer("num_layers", "num_hidden_layers"),
        "hidden": hidden,
        "num_heads": sound.integer("num_heads", "num_attention_heads"),
        "chunk": chunk,
        "context": chunk,
        "conv_kernel": sound.optional("conv_kernel_size", 15),
        "sampled_features": sound.integer("input_dim", "num_mel_bins"),
        "output": 0,
        "intermediate": hidden * sound.optional("feedforward_mult", 4),
        "conv_width": hidden * sound.optional("conv_expansion_factor", 2),
        "num_positions": 2 * sound.optional("max_pos_emb", 512) + 1,
        "frame_ms": _STACKED_FRAME_MS,
        "max_frames": 0,
        "query_window": window,
        "window_queries": max(window // reader.optional("downsample_rate", 5), 1),
        "query_layers": queries.optional("num_hidden_layers", 12),
        "query_heads": queries.optional("num_attention_heads", 12),
        "query_intermediate": queries.optional("intermediate_size", 3072),
    }
    for name, part in (("encoder_config", sound), ("projector_config", queries)):
        for violation in part.violations:
            reader.refuse(f"{name}.{violation.field}", violation.description)
    return LayerPart(kind="audio_encoder", dims=dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hearing:
    """How a model hears by Whisper's encoder.

    `merged` frames become one of its tokens, what fills a window up as well with
    `has_whole_windows`. They are stacked before a projector of two products, or their mean goes
    through one, or through two with `has_middle`. A window is as long as positions are known, or
    `frames` of `frames_per_s`.
    """

    merged: int
    has_whole_windows: bool = True
    is_stacked: bool = False
    has_middle: bool = False
    frames: int = 0
    frames_per_s: int = 50


# Source: Qwen2-Audio's `avg_pooler`; `audio_config.intermediate_size` over its width in Voxtral's
# `get_audio_features`; of Qwen's Omni models pieces of `2 * n_window` frames, 100 a second, that
# one convolution of stride 2 is over, or three.
_SPEAKING = {
    "qwen2_audio": _Hearing(merged=2, has_whole_windows=False),
    "qwen2_5_omni_thinker": _Hearing(merged=2, frames=100),
    "qwen3_omni_moe_thinker": _Hearing(merged=1, frames=13, frames_per_s=13, has_middle=True),
    "voxtral": _Hearing(merged=4, is_stacked=True),
}


# What files leave out of their text models. Source: `Qwen2Config` of transformers 5.
_WIDE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXT_DEFAULTS = {"qwen2_audio": {**_WIDE, "num_key_value_heads": 32, "intermediate_size": 22016}}


def _speech_encoder(outer: ConfigReader, config: object) -> LayerPart:
    """Return Whisper's encoder; further keys change no weights."""
    if not isinstance(config, Mapping):
        outer.refuse("audio_config", f"expected an object, found {config!r:.80}")
        config = {}
    sound = ConfigReader(config)
    hearing = _SPEAKING[str(outer.get("model_type"))]
    hidden = sound.integer("d_model", "hidden_size")
    text = outer.get("text_config")
    width = text.get("hidden_size", 0) if isinstance(text, Mapping) else 0
    dims = {
        "num_layers": sound.integer("encoder_layers", "num_hidden_layers"),
        "hidden": hidden,
        "num_heads": sound.integer("encoder_attention_heads", "num_attention_heads"),
        "intermediate": sound.integer("encoder_ffn_dim", "intermediate_size"),
        "mel_bins": sound.optional("num_mel_bins", 128),
        "num_positions": hearing.frames or sound.optional("max_source_positions", 1500),
        "frames_per_s": hearing.frames_per_s,
        "merged_frames": hearing.merged,
        "has_whole_windows": int(hearing.has_whole_windows),
        "projector_in": hidden * (hearing.merged if hearing.is_stacked else 1),
        "projector_intermediate": width if hearing.is_stacked else hidden * hearing.has_middle,
    }
    for violation in sound.violations:
        outer.refuse(f"audio_config.{violation.field}", violation.description)
    return LayerPart(kind="speech_encoder", dims=dims)


def _thinker(model_type: str, reader: ConfigReader) -> Fields:
    """Read what an Omni model hears, sees and writes with; what it speaks with is left out.

    Source: vLLM, models/qwen2_5_omni_thinker.py and qwen3_omni_moe_thinker.py, which serve this
    part alone.
    """
    reader.ignore("talker_config", "token2wav_config", "code2wav_config", "enable_audio_output")
    reader.ignore("enable_talker", "system_prompt")
    thinker = reader.section("thinker_config")
    thinker.assume({"model_type": f"{model_type}_thinker"})
    return _read(f"{model_type}_thinker", thinker)


MULTIMODAL: Mapping[str, Callable[[ConfigReader], Fields]] = {
    **{model_type: partial(_read, model_type) for model_type in _TYPES},
    "gemma3n": read_gemma3n_seeing,
    "inkling_mm_model": read_inkling_seeing,
    "phi4mm": partial(read_phi4mm, GROUPED["phi3"]),
    **{each: partial(_thinker, each) for each in ("qwen2_5_omni", "qwen3_omni_moe")},
}
