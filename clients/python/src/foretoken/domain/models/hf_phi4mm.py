"""Hugging Face files of Phi-4-multimodal as Microsoft publishes them (`phi4mm`).

What it sees and hears with is in `embd_layer` and `audio_processor`; its own code sets the tower of
images, SigLIP's (so400m, patches of 14 of 448 pixels). Adapters that text has with either are a
workload's (`lora`).
Source: the fields of its config.json as TensorRT-LLM's `test_modeling_phi4mm.py` has them;
`phi4_multimodal` in transformers 5, which is the same model.
"""

from collections.abc import Callable

from foretoken.domain.models.hf_parts import Fields
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart

# Source: `get_siglip_vision_model` of its repository, `Phi4MultimodalVisionConfig`.
_LAYERS, _HIDDEN, _HEADS, _INNER, _PATCH = 27, 1152, 16, 4304, 14
# Pixels have three numbers, and four patches become a token.
_COLORS, _MERGED = 3, 4
# A spectrum every so many ms; what is longer than so many frames is heard in pieces of them.
# Source: `max_seq_len` of `Phi4MultimodalAudioModel`.
_SPECTRUM_MS, _PIECE = 10, 500


def read_phi4mm(read_text: Callable[[ConfigReader], Fields], reader: ConfigReader) -> Fields:
    """Read a file of Phi-4-multimodal, whose text model is that of Phi-3's files."""
    reader.ignore("img_processor", "vision_lora", "speech_lora")
    embedded = reader.part("embd_layer")
    fields = read_text(reader)
    extras: tuple[LayerPart, ...] = fields.get("extras", ())
    if embedded.has("image_embd_layer"):
        side = embedded.part("image_embd_layer").optional("crop_size", 448)
        extras = (*extras, _siglip(side, fields["hidden"]))
    if reader.has("audio_processor"):
        processor = reader.part("audio_processor")
        extras = (*extras, _conformer(processor.part("config"), fields["hidden"]))
    return {**fields, "extras": extras}


def _siglip(side: int, hidden: int) -> LayerPart:
    return LayerPart(
        kind="encoder",
        dims={
            "num_layers": _LAYERS,
            "hidden": _HIDDEN,
            "num_heads": _HEADS,
            "intermediate": _INNER,
            "has_bias": 1,
            "patch_features": _COLORS * _PATCH**2,
            "num_positions": (side // _PATCH) ** 2,
            # Patches are averaged before the projector's two products.
            "projector_in": _HIDDEN,
            "projector_intermediate": hidden,
            "patch_side": _PATCH,
            "merged_patches": _MERGED,
        },
    )


def _conformer(sound: ConfigReader, hidden: int) -> LayerPart:
    """Return the encoder of sound.

    Both halves of its MLP are gated, and its convolution has one product more than others': these
    count as width of the halves. A second projector, for sound with images, is not counted.
    """
    reduction = sound.optional("time_reduction", 8)
    convolved = sound.optional("ext_pw_out_channel", 1024)
    channels = sound.part("nemo_conv_settings").optional("conv_channels", 1024)
    return LayerPart(
        kind="audio_encoder",
        dims={
            "num_layers": sound.integer("num_blocks"),
            "hidden": sound.integer("attention_dim"),
            "num_heads": sound.integer("attention_heads"),
            "chunk": _PIECE,
            "context": _PIECE,
            "conv_kernel": sound.optional("kernel_size", 3),
            "sampled_features": channels * -(-sound.optional("input_size", 80) // reduction),
            "output": hidden,
            "intermediate": 3 * sound.integer("linear_units") // 2 + convolved // 4,
            "conv_width": convolved,
            "num_positions": 1,
            "frame_ms": _SPECTRUM_MS * reduction,
            "max_frames": 0,
        },
    )
