"""Every model type that transformers has is read with the parameters that it builds."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.domain.models.hf_multimodal import MULTIMODAL, TEXT_MODELS
from foretoken.domain.models.parameters import count_parameters

_MAX_ERROR, _MAX_ERROR_OF_ENCODERS = 2e-4, 3e-3
# What these classes have no default for.
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
_CONVOLVED = {"num_hidden_layers": 8, "layer_types": ["conv", "conv", "conv", "full_attention"] * 2}
_DELTAS = ["linear_attention", "sliding_attention"] * 4
# The text model of Qwen3-Omni-30B-A3B; the class's own heads do not divide its width.
_OMNI = {
    "text_config": {
        "vocab_size": 152064,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
}
# The queries of granite-speech-3.3; the class's own are of another width.
_QUERIES = {
    "model_type": "blip_2_qformer",
    "hidden_size": 1024,
    "encoder_hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "cross_attention_frequency": 1,
}
_MISSING: Mapping[str, Mapping[str, Any]] = {
    "granite_speech": {"projector_config": _QUERIES},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": _ROUTED,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lara_mini": {"num_hidden_layers": 8, "layer_types": _DELTAS},
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "ministral": {"head_dim": 128},
    "qwen3_omni_moe_thinker": _OMNI,
    "zamba2": {"num_mem_blocks": 2, "use_shared_attention_adapter": True},
    "nemotron": {"num_key_value_heads": 8},
}
# DBRX cannot be built from its defaults; LongCat's class has weights for experts that have none.
_OTHERWISE = {"dbrx", "longcat_flash"}
_SEEING = (
    *("gemma3", "gemma4_unified", "glm4v_moe", "idefics3", "internvl", "lfm2_vl", "llava"),
    *("llava_next", "smolvlm", "llava_onevision", "mistral3", "mistral4", "qwen2_5_vl"),
    *("glm5_next", "muse_glimmer", "qwen2_vl"),
)
# By a name of their class; those have none of text alone.
_HEARING = {
    "granite_speech": "GraniteSpeechForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
}


def _built_types() -> Sequence[str]:
    """Return every type of text model that is read and that transformers has a class for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return [name for name in sorted({*TEXT_MODELS} - {*MULTIMODAL} - _OTHERWISE) if name in NAMES]


def _error(model_type: str, make: Callable[[Any], Any]) -> float:
    """Return how far the total is off that of the model that transformers builds, as a ratio."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **_MISSING.get(model_type, {}))
    with torch.device("meta"):
        built = sum(each.numel() for each in make(config).parameters())
    content = {**config.to_dict(), "model_type": model_type}
    counted = count_parameters(architecture_of_hf_config(content, model_type)).total
    return float(counted / built - 1)


@pytest.fixture(scope="module")
def auto() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return pytest.importorskip("transformers")


@pytest.mark.slow
def test_totals_are_those_of_the_models_that_transformers_builds(auto: Any) -> None:
    """Norms behind halves of layers and biases of some heads, which are not counted, are small."""
    types = _built_types()
    errors = {each: _error(each, auto.AutoModelForCausalLM.from_config) for each in types}
    assert {} == {each: error for each, error in errors.items() if abs(error) > _MAX_ERROR}
    assert 114 <= len(types)


@pytest.mark.slow
def test_totals_of_models_that_see_are_those_that_transformers_builds(auto: Any) -> None:
    """Heads of encoders are not counted."""
    found = {each: _error(each, auto.AutoModelForImageTextToText.from_config) for each in _SEEING}
    assert {} == {
        each: error for each, error in found.items() if abs(error) > _MAX_ERROR_OF_ENCODERS
    }


@pytest.mark.slow
def test_totals_of_models_that_hear_are_those_that_transformers_builds(auto: Any) -> None:
    """Qwen3-Omni's convolutions are not counted as they are."""
    found = {each: _error(each, getattr(auto, name)) for each, name in _HEARING.items()}
    assert {} == {
        each: error for each, error in found.items() if abs(error) > _MAX_ERROR_OF_ENCODERS
    }
    assert [0.0, 0.0] == [found[each] for each in ("qwen2_audio", "voxtral")]


def test_a_file_that_leaves_defaults_out_is_read() -> None:
    """The public Qwen2-Audio-7B, whose checkpoint has 8,397,094,912 parameters."""
    text = {"model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 156032}
    sound = {"encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    content = {
        "model_type": "qwen2_audio",
        "vocab_size": 156032,
        "text_config": {**text, "max_position_embeddings": 8192, "use_mrope": False},
        "audio_config": {**sound, "d_model": 1280},
    }
    model = architecture_of_hf_config(content, "qwen2_audio")
    assert 8_397_094_912 == count_parameters(model).total


def test_what_an_omni_model_speaks_with_is_left_out() -> None:
    """It is read as its thinker, which is what engines serve, whatever else the file has."""
    text = {"model_type": "qwen2_5_omni_text", "hidden_size": 3584, "num_hidden_layers": 28}
    text |= {"intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    text |= {"vocab_size": 152064, "max_position_embeddings": 32768}
    sound = {"encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    thinker = {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": text,
        "audio_config": {**sound, "d_model": 1280, "n_window": 100},
        "position_id_per_seconds": 25,
    }
    alone = architecture_of_hf_config(thinker, "omni")
    whole = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {key: value for key, value in thinker.items() if key != "model_type"},
        "talker_config": {"hidden_size": 896},
    }
    assert alone == architecture_of_hf_config(whole, "omni")
    assert ["speech_encoder"] == [part.kind for part in alone.extras]
