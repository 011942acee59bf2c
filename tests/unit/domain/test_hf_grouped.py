"""Reading models of grouped attention that differ from Llama, as their files say it."""

from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.stack import stack_of, state_of

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
_WITHOUT = {"sliding_window": None}
_EXPERTS = {"moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4}

# As Hugging Face counts the tensors of their files.
_LANGUAGE_MODELS = {
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_099_328,
    "gemma-3-12b": 11_765_788_416,
    "gemma-3-27b": 27_009_002_240,
    "mistral-small-3.2-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "qwen2.5-vl-7b": 7_615_616_512,
    "qwen2.5-vl-72b": 72_706_203_648,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


def _read(model_type: str, **keys: Any) -> ModelArchitecture:
    return architecture_of_hf_config({"model_type": model_type, **_SMALL, **keys}, model_type)


def _mixers(model: ModelArchitecture) -> list[LayerPart | None]:
    return [layer.mixer for layer in model.layers]


@pytest.mark.parametrize(
    ("model_type", "keys", "pattern"),
    [
        ("gemma2", {}, "4*(window-mlp full-mlp)"),
        ("gemma3_text", {}, "5*window-mlp full-mlp 2*window-mlp"),
        ("gemma3_text", {"sliding_window_pattern": 4}, "2*(3*window-mlp full-mlp)"),
        (
            "exaone4",
            {"sliding_window_pattern": "LLG"},
            "2*(2*window-mlp full-mlp) window-mlp full-mlp",
        ),
        ("exaone4", {"sliding_window": None}, "8*full-mlp"),
        (
            "olmo3",
            {"layer_types": ["full_attention", "sliding_attention"] * 4},
            "4*(full-mlp window-mlp)",
        ),
        ("phi3", {}, "8*window-mlp"),
        ("dots1", {**_EXPERTS, "first_k_dense_replace": 1, **_WITHOUT}, "full-mlp 7*full-experts"),
    ],
)
def test_layers_are_where_the_file_or_its_family_has_them(
    model_type: str, keys: dict[str, Any], pattern: str
) -> None:
    assert pattern == _read(model_type, **{"sliding_window": 1024, **keys}).pattern


def test_gemma_3_takes_what_its_files_leave_out_from_its_configuration_class() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}}
    model = architecture_of_hf_config(config, "gemma-3-4b")
    window = model.layers[0].mixer
    assert window is not None
    assert (262208, 131072, True, "gelu") == (
        model.vocab,
        model.max_position,
        model.has_tied_embedding,
        model.activation,
    )
    assert (8, 4, 256, 1) == tuple(
        window[name] for name in ("num_heads", "num_kv_heads", "head_dim", "qk_norm")
    )


def test_command_r_turns_by_position_in_windows_alone() -> None:
    model = _read("cohere2", sliding_window=4096, layer_switch=4)
    assert model.has_parallel_residual
    assert "layer_norm" == model.norm
    window, full = (mixer for mixer in _mixers(model) if mixer is not None)
    assert ((4096, 1), (0, 0)) == (
        (window["window"], window["has_rope"]),
        (full["window"], full["has_rope"]),
    )


def test_queries_are_normed_where_the_file_says_so() -> None:
    for flag in (False, True):
        (mixer, *_) = _mixers(_read("glm4_moe", **_EXPERTS, use_qk_norm=flag))
        assert mixer is not None
        assert int(flag) == mixer["qk_norm"]


def test_qwen_2_5_vl_may_have_its_text_model_among_its_own_keys() -> None:
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
    }
    flat = _read("qwen2_5_vl", vision_config=vision)
    config = {"model_type": "qwen2_5_vl", "text_config": _SMALL, "vision_config": vision}
    nested = architecture_of_hf_config(config, "qwen2_5_vl")
    assert nested == flat
    (encoder,) = flat.extras
    assert (64, 96, 1, 4) == tuple(
        encoder[name] for name in ("hidden", "intermediate", "is_gated", "merged_patches")
    )


def test_granite_4_has_state_space_layers_among_attention() -> None:
    model = _read(
        "granitemoehybrid",
        layer_types=["mamba"] * 3 + ["attention"] + ["mamba"] * 4,
        mamba_n_heads=16,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_d_head="auto",
        shared_intermediate_size=512,
        num_local_experts=0,
        position_embedding_type="nope",
    )
    assert "3*mamba-mlp full-mlp 4*mamba-mlp" == model.pattern
    mamba, full = (mixer for mixer in _mixers(model) if mixer is not None)
    # Twice the model's width over the heads.
    assert (32, 0) == (mamba["head_dim"], full["has_rope"])


@pytest.mark.parametrize(("preset", "published"), sorted(_LANGUAGE_MODELS.items()))
def test_presets_have_the_published_parameters(preset: str, published: int) -> None:
    """Without encoders of images; norms behind halves of layers are not counted."""
    count = count_parameters(find_model(preset))
    encoders = sum(part.total for part in count.parts if part.part.kind == "encoder")
    assert pytest.approx(published, rel=1e-4) == count.total - encoders


def test_ling_flash_has_the_published_parameters() -> None:
    """Its card: 103 billion, 6.1 active, of which 4.8 are no embedding."""
    keys = {
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 32,
        "vocab_size": 157184,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "score_function": "sigmoid",
    }
    count = count_parameters(_read("bailing_moe", **keys))
    embeddings = count.embedding + count.lm_head
    found = [count.total, count.active_total, count.active_total - embeddings]
    assert pytest.approx([103e9, 6.1e9, 4.8e9], rel=0.02) == found


def test_hunyuan_a13b_has_the_published_parameters() -> None:
    """Its card: 80 billion, 13 active; its file says the experts of every layer."""
    keys = {
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128167,
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "moe_intermediate_size": [3072] * 32,
        "num_shared_expert": [1] * 32,
        "use_qk_norm": True,
        "use_mixed_mlp_moe": True,
        "tie_word_embeddings": True,
    }
    count = count_parameters(_read("hunyuan_v1_moe", **keys))
    assert pytest.approx([80e9, 13e9], rel=0.025) == [count.total, count.active_total]
    uneven = {**keys, "moe_topk": [8] * 31 + [4]}
    with pytest.raises(InvalidRequestError, match="moe_topk: expected an integer"):
        _read("hunyuan_v1_moe", **uneven)


def test_the_first_of_four_layers_sees_all_tokens_where_a_family_has_it_so() -> None:
    assert "2*(full-mlp 3*window-mlp)" == _read("cwm", sliding_window=1024).pattern


def test_a_parallel_residual_is_of_dense_halves() -> None:
    with pytest.raises(InvalidRequestError, match="has_parallel_residual"):
        _read("glm4_moe", **_EXPERTS, use_parallel_residual=True)


def test_layers_of_gemma_4_may_have_heads_of_their_own_by_number() -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"]
    own = {"3": {"head_dim": 64}, "07": {"head_dim": 64}}
    model = _read("gemma4_text", sliding_window=512, layer_types=types * 2, per_layer_config=own)
    assert [32, 64] == [mixer["head_dim"] for mixer in _mixers(model) if mixer is not None]
    with pytest.raises(InvalidRequestError, match="must name the layers of full attention"):
        _read("gemma4_text", sliding_window=512, layer_types=types * 2, per_layer_config={"3": {}})


def test_the_last_layers_of_gemma_4_e2b_keep_nothing_of_a_request() -> None:
    """Its card: 2.3 billion effective; 15 of 35 layers have keys and values, 3 of them of all."""
    keys = {
        "hidden_size": 1536,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": 6144,
        "vocab_size": 262144,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    }
    model = _read("gemma4_text", **keys)
    shared = "4*shared-window-mlp shared-full-mlp"
    assert f"3*(4*window-mlp full-mlp) {' '.join([shared] * 4)}" == model.pattern
    # As transformers 5.24 builds it, but for norms behind halves of layers.
    count = count_parameters(model)
    assert pytest.approx(4_628_569_344, rel=5e-5) == count.total
    assert pytest.approx(2.3e9, rel=0.01) == count.active_total
    states = [(state_of(part), len(layers)) for part, layers in stack_of(model).mixers.items()]
    assert 3 * 2 * 512 == sum(state.token_elements * number for state, number in states)
    assert 12 * 2 * 256 == sum(state.window_elements * number for state, number in states)
    widths = [layer.feed_forward["intermediate"] for layer in model.layers if layer.feed_forward]
    assert [6144, 6144, 12288, 12288] == widths


def test_the_encoder_of_sound_of_gemma_4_has_the_weights_that_transformers_builds() -> None:
    """Without the convolutions that sample frames down; with the product to the model's width."""
    sound = {"model_type": "gemma4_audio", "hidden_size": 1024, "num_hidden_layers": 12}
    keys = {"conv_kernel_size": 5, "output_proj_dims": 1536, "attention_chunk_size": 12}
    text = {"model_type": "gemma4_text", **_SMALL, "sliding_window": 512}
    config: dict[str, Any] = {
        "model_type": "gemma4",
        "text_config": text,
        "audio_config": {**sound, **keys},
    }
    (encoder,) = count_parameters(architecture_of_hf_config(config, "gemma4")).parts[-1:]
    assert "audio_encoder" == encoder.part.kind
    assert pytest.approx(304_824_608 + 1536 * 256, rel=2e-4) == encoder.total
    config["audio_config"] = {**sound, "num_hidden_layers": 0}
    with pytest.raises(InvalidRequestError, match=r"audio_config\.num_hidden_layers"):
        architecture_of_hf_config(config, "gemma4")


def test_bloom_and_mpt_have_the_published_parameters_and_turn_no_positions() -> None:
    """Cards: 176,247 million; 30 billion. ALiBi runs inside attention."""
    bloom: dict[str, Any] = {
        "model_type": "bloom",
        "n_embed": 14336,
        "n_layer": 70,
        "n_head": 112,
        "vocab_size": 250880,
        "seq_length": 2048,
    }
    mpt: dict[str, Any] = {
        "model_type": "mpt",
        "d_model": 7168,
        "n_heads": 64,
        "n_layers": 48,
        "max_seq_len": 8192,
        "vocab_size": 50432,
        "attn_config": {"alibi": True, "attn_type": "multihead_attention"},
    }
    models = [architecture_of_hf_config(config, config["model_type"]) for config in (bloom, mpt)]
    totals = [count_parameters(model).total / 1e9 for model in models]
    assert pytest.approx([176.247, 30.0], rel=0.002) == totals
    assert [0, 0] == [mixer["has_rope"] for model in models for mixer in _mixers(model) if mixer]
    with pytest.raises(InvalidRequestError, match=r"attn_config\.alibi: only True"):
        architecture_of_hf_config({**mpt, "attn_config": {"alibi": False}}, "mpt")
