"""Reading models that mix attention with other layers, as their files say it."""

from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.stack import state_of

_LFM2_8B = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "conv_L_cache": 3,
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "full_attn_idxs": [2, 6, 10, 14, 18, 21],
}
_LONGCAT = {
    "hidden_size": 6144,
    "num_layers": 28,
    "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
    "moe_topk": 12,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 131072,
    "attention_method": "MLA",
}
_FALCON_H1_34B = {
    "hidden_size": 5120,
    "intermediate_size": 21504,
    "num_hidden_layers": 72,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mamba_d_ssm": 4096,
    "mamba_n_heads": 32,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "vocab_size": 261120,
    "max_position_embeddings": 262144,
    "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35],
}


def _read(model_type: str, config: dict[str, Any]) -> ModelArchitecture:
    return architecture_of_hf_config({"model_type": model_type, **config}, model_type)


@pytest.mark.parametrize(
    ("model_type", "config", "total", "active"),
    [
        ("lfm2_moe", _LFM2_8B, 8.3, 1.5),
        ("longcat_flash", _LONGCAT, 560, 27),
        ("falcon_h1", _FALCON_H1_34B, 33.6, 33.6),
    ],
)
def test_parameters_are_the_published_ones(
    model_type: str, config: dict[str, Any], total: float, active: float
) -> None:
    """In billions, in all and those that a token sees, as cards say them: in two digits."""
    count = count_parameters(_read(model_type, config))
    assert pytest.approx([total, active], rel=0.04) == [
        count.total / 1e9,
        count.active_total / 1e9,
    ]


def test_lfm2_convolves_where_no_attention_is() -> None:
    model = _read("lfm2_moe", _LFM2_8B)
    assert model.pattern.startswith("2*conv-mlp 4*(full-experts 3*conv-experts)")
    conv = model.layers[0].mixer
    assert conv is not None
    # Two tokens before the current one, of 2,048 features in 16 bits, split over ranks.
    assert [8192, 2048] == [state_of(conv, tp).request_bytes for tp in (1, 4)]


def test_layers_of_lfm2_have_to_be_listed() -> None:
    config = {key: value for key, value in _LFM2_8B.items() if key != "full_attn_idxs"}
    with pytest.raises(InvalidRequestError, match="layer_types: required"):
        _read("lfm2_moe", config)


def test_longcat_has_its_experts_between_two_sublayers() -> None:
    model = _read("longcat_flash", _LONGCAT)
    assert "28*(latent-mlp experts latent-mlp)" == model.pattern
    with pytest.raises(InvalidRequestError, match="attention_method"):
        _read("longcat_flash", {**_LONGCAT, "attention_method": "GQA"})
    with pytest.raises(InvalidRequestError, match="ffn_hidden_size"):
        _read("longcat_flash", {**_LONGCAT, "ffn_hidden_size": 0})


def test_mamba2_keeps_a_state_of_a_request_and_nothing_of_a_token() -> None:
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "vocab_size": 32768,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    model = _read("mamba2", config)
    assert "64*mamba" == model.pattern
    mamba = model.layers[0].mixer
    assert mamba is not None
    state = state_of(mamba)
    # 128 heads of 64 x 128 in 32 bits; three inputs of 10,240 channels in 16.
    assert (0, 4 * 128 * 64 * 128 + 3 * 10240 * 2) == (state.token_elements, state.request_bytes)


def test_jamba_has_attention_in_one_of_eight_layers_and_experts_in_every_second() -> None:
    """Jamba 1.5 Mini's card: 52 billion, 12 active; a file may list its layers as well."""
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 256,
        "vocab_size": 65536,
        "max_position_embeddings": 262144,
    }
    model = _read("jamba", config)
    count = count_parameters(model)
    assert pytest.approx([52e9, 12e9], rel=0.02) == [count.total, count.active_total]
    period = "mamba-mlp mamba-experts mamba-mlp mamba-experts full-mlp mamba-experts"
    assert f"4*({period} mamba-mlp mamba-experts)" == model.pattern
    mamba = model.layers[0].mixer
    assert mamba is not None
    # 8,192 channels of 16 in 32 bits, three inputs of each in 16; split over ranks.
    whole = 8192 * 16 * 4 + 8192 * 3 * 2
    assert [whole, whole / 4] == [state_of(mamba, tp).request_bytes for tp in (1, 4)]
    dense = _read("jamba", {**config, "num_experts": 1})
    assert {"mamba-mlp", "full-mlp"} == {layer.name for layer in dense.layers}


def test_falcon_mamba_has_the_published_parameters() -> None:
    config = {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024, "state_size": 16}
    model = _read("falcon_mamba", {**config, "tie_word_embeddings": False})
    assert pytest.approx(7.27e9, rel=0.001) == count_parameters(model).total


def test_minimax_text_01_has_full_attention_in_every_eighth_layer() -> None:
    """Its card: 456 billion, 45.9 active without embeddings."""
    config = {
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attn_type_list": [*[0] * 7, 1] * 10,
        "layernorm_linear_attention_alpha": 3.5,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "rotary_dim": 64,
        "shared_intermediate_size": 0,
        "vocab_size": 200064,
        "max_position_embeddings": 10240000,
    }
    model = _read("minimax_text_01", config)
    count = count_parameters(model)
    active = count.active_total - count.embedding - count.lm_head
    assert pytest.approx([456e9, 45.9e9], rel=0.002) == [count.total, active]
    assert "10*(7*lightning-experts full-experts)" == model.pattern
    lightning = model.layers[0].mixer
    assert lightning is not None
    # 64 heads of 128 x 128 in 32 bits.
    assert [4 * 2**20, 2**19] == [state_of(lightning, tp).request_bytes for tp in (1, 8)]


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("bloom-176b", 176.247, 176.247),
        ("falcon-mamba-7b", 7.273, 7.273),
        ("gemma-4-e2b", 5.1, 2.3),
        ("gemma-4-e4b", 8.0, 4.5),
        ("jamba-1.5-mini", 52, 12),
        ("minimax-text-01", 456, 48.4),
    ],
)
def test_presets_have_what_cards_publish(preset: str, total: float, active: float) -> None:
    """In billions; active ones with the embeddings, encoders and embeddings for layers aside."""
    count = count_parameters(find_model(preset))
    assert pytest.approx(total, rel=0.01) == count.total / 1e9
    assert pytest.approx(active, rel=0.035) == count.active_total / 1e9


def test_falcon_40b_has_the_published_parameters_and_8_heads_of_keys() -> None:
    config = {
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "num_hidden_layers": 60,
        "vocab_size": 65024,
        "new_decoder_architecture": True,
        "parallel_attn": True,
    }
    model = _read("falcon", config)
    assert 41.3 == pytest.approx(count_parameters(model).total / 1e9, rel=0.005)
    assert 8 == model.num_kv_heads
    assert 1 == _read("falcon", {**config, "new_decoder_architecture": False}).num_kv_heads
    with pytest.raises(InvalidRequestError, match="new_decoder_architecture"):
        _read("falcon", {**config, "alibi": True})


def test_falcon_rw_has_the_published_parameters_and_no_rotary_embedding() -> None:
    """Falcon-RW-1B's checkpoint has 1,311,625,216."""
    own = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24}
    model = _read("falcon", {**own, **sizes, "vocab_size": 50304})
    assert 1_311_625_216 == count_parameters(model).total
    mixers = [layer.mixer for layer in model.layers]
    assert {(32, 0)} == {(part["num_kv_heads"], part["has_rope"]) for part in mixers if part}


def test_dbrx_has_the_published_parameters() -> None:
    """Its card: 132 billion, 36 active."""
    config = {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32768,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }
    count = count_parameters(_read("dbrx", config))
    assert pytest.approx([132e9, 36e9], rel=0.015) == [count.total, count.active_total]


def test_internvl_chat_names_its_text_model_by_a_key_of_its_own() -> None:
    text = {
        "model_type": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "attn_implementation": "flash_attention_2",
    }
    vision = {
        "model_type": "intern_vit_6b",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": 448,
        "patch_size": 14,
    }
    own = {"llm_config": text, "vision_config": vision, "downsample_ratio": 0.5}
    (encoder,) = _read("internvl_chat", {**own, "max_dynamic_patch": 12}).extras
    assert (1024, 4, 256, 256) == tuple(
        encoder[name]
        for name in ("num_positions", "merged_patches", "projector_in", "projector_intermediate")
    )


def test_llama_4_sees_by_tiles_whose_pixels_are_shuffled_into_tokens() -> None:
    """As published, with `vision_config`: a head of the tile, and three products to the text."""
    text = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 1,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "vocab_size": 202048,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "hidden_act": "silu",
        "moe_layers": [0],
        "no_rope_layers": [1],
        "attention_chunk_size": 8192,
    }
    vision = {
        "model_type": "llama4_vision_model",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "num_channels": 3,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "vision_output_dim": 4096,
    }
    tiles = {"image_processor_config": {"max_patches": 16}, "boi_token_index": 200080}
    model = _read("llama4", {"text_config": text, "vision_config": vision, **tiles})
    (encoder,) = (
        part.total for part in count_parameters(model).parts if part.part.kind == "encoder"
    )
    # Of transformers' model on the meta device, which has two more norms.
    assert 809467648 + 39845888 + 20971520 + 827904 + 812416 + 1408 + 5632 == encoder + 7040
