"""Towers known by their sums: Gemma 3n's of images and Inkling's patches; Gemma 3n's sound."""

import itertools
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.image_encoder import lower_encoder
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.domain.models.image import encode_images, without_encoder
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.sound import encode_sound
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.workload import ImageSpec, SoundSpec

_GEMMA: dict[str, Any] = {
    "model_type": "gemma3n",
    "text_config": {"model_type": "gemma3n_text"},
    "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
    "audio_config": {"model_type": "gemma3n_audio"},
    "vision_soft_tokens_per_image": 256,
    "audio_soft_tokens_per_image": 188,
}
_TEXT = {"hidden_size": 6144, "vocab_size": 1000, "num_hidden_layers": 6, "head_dim": 128}
_TEXT |= {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 1000}
_TEXT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def _inkling(num_layers: int, **vision: int) -> ModelArchitecture:
    content = {
        "model_type": "inkling_mm_model",
        "text_config": {"model_type": "inkling_text", **_TEXT},
        "vision_config": {"n_layers": num_layers, **vision},
        "audio_config": {"n_mel_bins": 80},
    }
    return architecture_of_hf_config(content, "inkling")


def _total(model: ModelArchitecture, kind: str) -> int:
    return sum(part.total for part in count_parameters(model).parts if part.part.kind == kind)


def test_gemma_3n_is_read_with_what_it_sees_and_hears_with() -> None:
    """Its sound as transformers builds it, but for two small convolutions before its layers.

    MobileNet-V5 has 294,126,912 weights in timm, and a projector to the model's width.
    """
    torch = pytest.importorskip("torch")
    from transformers import Gemma3nAudioConfig, Gemma3nAudioEncoder

    model = architecture_of_hf_config(_GEMMA, "gemma-3n")
    with torch.device("meta"):
        conformer = Gemma3nAudioEncoder(Gemma3nAudioConfig())
    built = sum(each.numel() for each in conformer.parameters()) + 1536 * 2048
    assert pytest.approx(built, rel=1e-3) == _total(model, "audio_encoder")
    assert 294_126_912 + 2048 * 2048 == _total(model, "summed_encoder")
    assert ["layer_embeddings", "laurel", "alternating_updates"] == [
        part.kind for part in without_encoder(model).extras if part.kind != "audio_encoder"
    ]


def test_every_image_of_gemma_3n_is_as_many_tokens_and_its_work_is_that_of_mobilenet() -> None:
    model = architecture_of_hf_config(_GEMMA, "gemma-3n")
    found = encode_images(model, ImageSpec(num_images=3, height=2000, width=100))
    assert (3, 256) == (found.num_images, found.tokens_each)
    rank = RankContext(model=model, layout=ParallelLayout(tp=2), devices_per_node=8)
    products, projector = lower_encoder(rank, found, DType.BF16)
    work = find_operator("gemm").flops(products.dims, 2.0) / 2
    # 387.8 G of its convolutions, and 47.9 G of its attention, for each image.
    assert pytest.approx(3 * 435.7e9, rel=1e-3) == work
    assert {"m": 3 * 256, "n": 2048, "k": 2048} == dict(projector.dims)


def test_every_fourth_frame_of_gemma_3n_is_a_token() -> None:
    """Half a minute is 188, as its processor says."""
    model = architecture_of_hf_config(_GEMMA, "gemma-3n")
    assert 188 == encode_sound(model, SoundSpec(seconds=30)).tokens_each
    assert 25 == encode_sound(model, SoundSpec(seconds=4)).tokens_each


def test_another_tower_of_timm_is_refused() -> None:
    vision = {**_GEMMA["vision_config"], "architecture": "resnet50"}
    with pytest.raises(InvalidRequestError, match=r"only mobilenetv5_300m_enc is known"):
        architecture_of_hf_config({**_GEMMA, "vision_config": vision}, "gemma-3n")


@pytest.mark.parametrize("num_layers", [3, 4, 5, 6, 24])
def test_patches_of_inkling_are_the_products_that_transformers_plans(num_layers: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.inkling.configuration_inkling import InklingVisionConfig

    config = InklingVisionConfig(num_hidden_layers=num_layers)
    with torch.device("meta"):
        built = sum(layer.projection.weight.numel() for layer in _planned(config))
    assert built == _total(_inkling(num_layers), "summed_encoder")


def _planned(config: Any) -> list[Any]:
    """Return the layers as the model's constructor makes them."""
    import torch
    from transformers.models.inkling.modeling_inkling import (
        InklingVisionEncoderLayer,
        plan_out_scales,
    )

    sizes = (config.temporal_patch_size, config.patch_size)
    with torch.device("cpu"):
        scales = plan_out_scales(*sizes, config.num_hidden_layers, config.num_channels).tolist()
    layers = []
    for place, (first, last) in enumerate(itertools.pairwise(scales)):
        folded = [after // before for before, after in zip(first, last, strict=True)][:3]
        into = first[3] * folded[0] * folded[1] * folded[2]
        is_last = place == config.num_hidden_layers - 1
        out = config.text_hidden_size if is_last else last[3]
        made = InklingVisionEncoderLayer(into, out, folded[0], folded[1], add_norm=False)
        layers.append(made)
    return layers


def test_a_patch_of_inkling_is_a_token_and_two_frames_are_one() -> None:
    model = _inkling(4)
    found = encode_images(model, ImageSpec(num_images=1, height=400, width=395, num_frames=3))
    assert (2, 100, 100) == (found.num_images, found.num_patches, found.tokens_each)
    assert (80 * 256 + 1) * 6144 == _total(model, "sound_table")
    with pytest.raises(InvalidRequestError, match="has no encoder of it"):
        encode_sound(model, SoundSpec())


# Of microsoft/Phi-4-multimodal-instruct, without what says nothing of its size.
_PHI: dict[str, Any] = {
    "model_type": "phi4mm",
    "audio_processor": {
        "config": {
            "activation": "swish",
            "attention_dim": 1024,
            "attention_heads": 16,
            "chunk_size": -1,
            "ext_pw_out_channel": 1024,
            "input_size": 80,
            "kernel_size": 3,
            "linear_units": 1536,
            "nemo_conv_settings": {"conv_channels": 1024},
            "num_blocks": 24,
            "time_reduction": 8,
        },
        "name": "cascades",
    },
    "embd_layer": {
        "audio_embd_layer": {"compression_rate": 8, "projection_cls": "mlp"},
        "embedding_cls": "image_audio",
        "image_embd_layer": {"crop_size": 448, "use_hd_transform": True},
    },
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "img_processor": None,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
    "speech_lora": {"r": 320, "lora_alpha": 640},
    "vision_lora": {"r": 256, "lora_alpha": 512},
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def test_phi_4_multimodal_is_read_in_its_own_layout() -> None:
    """It is the model that transformers builds, but for heads of its tower and of the text."""
    torch = pytest.importorskip("torch")
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    model = architecture_of_hf_config(_PHI, "phi-4-multimodal")
    with torch.device("meta"):
        whole = Phi4MultimodalForCausalLM(Phi4MultimodalConfig(num_attention_heads=24))
    sizes = {name: each.numel() for name, each in whole.named_parameters()}
    left_out = ("lm_head.", ".img_processor.head.")
    sizes = {name: size for name, size in sizes.items() if not any(it in name for it in left_out)}
    assert pytest.approx(sum(sizes.values()), rel=5e-3) == count_parameters(model).total
    for kind, word in (("encoder", "image_embed"), ("audio_encoder", "audio_embed")):
        built = sum(size for name, size in sizes.items() if word in name)
        assert pytest.approx(built, rel=0.04) == _total(model, kind)
    assert 375 == encode_sound(model, SoundSpec(seconds=30)).tokens_each
    assert 256 == encode_images(model, ImageSpec(height=448, width=448)).tokens_each


def test_a_side_with_too_many_factors_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="256 has too many factors"):
        _inkling(4, patch_size=256)
