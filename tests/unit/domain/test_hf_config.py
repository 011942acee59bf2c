"""Reading a model from its Hugging Face `config.json`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS_OF_OTHERS, CONFIGS_OF_PRESETS

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.hf_config import architecture_of_hf_config, load_hf_config
from foretoken.domain.models.load import load_model
from foretoken.domain.models.parameters import count_parameters


@pytest.mark.parametrize("preset", sorted(CONFIGS_OF_PRESETS))
def test_a_config_gives_what_its_preset_says(preset: str) -> None:
    expected = dataclasses.replace(find_model(preset), aliases=())
    assert expected == architecture_of_hf_config(CONFIGS_OF_PRESETS[preset], preset)


@pytest.mark.parametrize("name", sorted(CONFIGS_OF_OTHERS))
def test_a_config_without_a_preset_has_the_published_parameters(name: str) -> None:
    config, published = CONFIGS_OF_OTHERS[name]
    found = count_parameters(architecture_of_hf_config(config, name)).total
    assert pytest.approx(published, rel=1e-4) == found


def _read(preset: str, **changes: Any) -> Any:
    return architecture_of_hf_config({**CONFIGS_OF_PRESETS[preset], **changes}, "changed")


def _violations(preset: str, **changes: Any) -> set[str]:
    with pytest.raises(InvalidRequestError, match="changed") as caught:
        _read(preset, **changes)
    return {violation.field for violation in caught.value.violations}


def test_keys_may_be_null_where_they_have_a_default() -> None:
    model = _read("llama-2-7b", num_key_value_heads=None, head_dim=None, tie_word_embeddings=None)
    assert (32, 128, False) == (model.num_kv_heads, model.head_dim, model.has_tied_embedding)


def test_a_window_counts_only_where_it_is_used() -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 4096}
    assert 4096 == _read("qwen2-7b", **windowed, max_window_layers=0).sliding_window
    # From the layer after the last on, which is what the library takes where nothing is said.
    assert 0 == _read("qwen2-7b", **windowed, max_window_layers=28).sliding_window
    assert 0 == _read("qwen2-7b", **windowed).sliding_window
    assert 0 == _read("qwen2-7b", sliding_window=4096).sliding_window
    assert 4096 == _read("mixtral-8x7b", sliding_window=4096).sliding_window


def test_the_layers_of_qwen_with_a_window_may_be_listed() -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 4096}
    types = (["sliding_attention"] * 3 + ["full_attention"]) * 7
    model = _read("qwen2-7b", **windowed, layer_types=types)
    assert (4096, 4) == (model.sliding_window, model.full_attention_period)
    assert 0 == _read("qwen2-7b", **windowed, layer_types=["full_attention"] * 28).sliding_window


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("llama-2-7b", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("llama-2-7b", {"n_routed_experts": 64, "moe_intermediate_size": 1408}),
        ("llama-2-7b", {"sliding_window": 4096}),
        ("llama-2-7b", {"layer_types": ["sliding_attention"] * 32}),
        ("llama-2-7b", {"kv_lora_rank": 512}),
        ("qwen2-7b", {"num_experts": 60}),
        ("qwen3-8b", {"mlp_bias": True}),
        ("mixtral-8x7b", {"shared_expert_intermediate_size": 4096}),
        ("gpt-neox-20b", {"sliding_window": 256}),
        ("gpt2-xl", {"num_experts": 8}),
        ("deepseek-v3", {"sliding_window": 4096}),
        ("internlm2-7b", {"num_experts": 8}),
    ],
    ids=lambda item: item if isinstance(item, str) else "+".join(item),
)
def test_a_key_of_other_models_that_changes_the_operators_is_refused(
    preset: str, changes: dict[str, Any]
) -> None:
    """No model is simulated as another one: all such keys are named."""
    assert changes.keys() == _violations(preset, **changes)


def test_keys_of_other_models_that_change_nothing_are_ignored() -> None:
    plain = _read("llama-2-7b")
    inert = {"num_local_experts": None, "sliding_window": None, "moe_layer_freq": 0}
    assert plain == _read("llama-2-7b", **inert, layer_types=["full_attention"] * 32)
    assert plain == _read("llama-2-7b", use_sliding_window=False, sliding_window=4096)


def test_layers_that_see_all_tokens_come_at_one_distance() -> None:
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    assert 6 == _read("gpt-oss-20b", layer_types=types).full_attention_period
    assert 0 == _read("gpt-oss-20b", layer_types=None).full_attention_period


def test_the_first_layers_may_be_dense() -> None:
    model = _read("qwen3-30b-a3b", mlp_only_layers=[1, 0])
    assert model.moe is not None
    assert 2 == model.moe.num_dense_layers


def test_gpt_neox_may_be_sequential() -> None:
    assert _read("gpt-neox-20b").has_parallel_residual
    assert not _read("gpt-neox-20b", use_parallel_residual=False).has_parallel_residual


def test_an_unknown_model_type_lists_what_is_supported() -> None:
    with pytest.raises(InvalidRequestError, match=r"'bert' of x is not supported.*llama.*qwen3"):
        architecture_of_hf_config({"model_type": "bert"}, "x")
    with pytest.raises(InvalidRequestError, match="None of x is not supported"):
        architecture_of_hf_config({}, "x")


def test_all_missing_keys_are_named_together() -> None:
    with pytest.raises(InvalidRequestError, match="required key is missing") as caught:
        architecture_of_hf_config({"model_type": "gpt2", "n_embd": 64}, "x")
    expected = {
        FieldViolation(key, "required key is missing")
        for key in ("n_layer", "n_head", "vocab_size", "n_positions")
    }
    assert expected == set(caught.value.violations)


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("llama-2-7b", "num_attention_heads", 0),
        ("llama-2-7b", "hidden_size", "4096"),
        ("llama-2-7b", "vocab_size", True),
        ("llama-2-7b", "hidden_act", "tanh"),
        ("llama-2-7b", "tie_word_embeddings", 1),
        ("llama-2-7b", "num_key_value_heads", 2.5),
        ("qwen3-30b-a3b", "decoder_sparse_step", 2),
        ("qwen3-30b-a3b", "mlp_only_layers", [3]),
        ("deepseek-v3", "moe_layer_freq", 2),
        ("deepseek-v3", "kv_lora_rank", None),
        ("phi-2", "qk_layernorm", True),
        ("llama-2-7b", "hidden_size", 4100),
        ("gpt2-xl", "n_embd", 1601),
        ("gpt-neox-20b", "attention_bias", False),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 3),
        ("gpt-oss-20b", "layer_types", "full_attention"),
    ],
)
def test_a_key_that_cannot_be_simulated_is_refused(preset: str, key: str, value: Any) -> None:
    assert {key} == _violations(preset, **{key: value})


def test_shared_experts_must_be_whole_ones() -> None:
    config = {**CONFIGS_OF_OTHERS["Qwen1.5-MoE-A2.7B"][0], "shared_expert_intermediate_size": 1500}
    with pytest.raises(InvalidRequestError, match="must be a multiple of moe_intermediate_size"):
        architecture_of_hf_config(config, "x")


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="num_kv_heads: 5 must divide the 32 heads"):
        _read("llama-2-7b", num_key_value_heads=5)
    with pytest.raises(InvalidRequestError, match="num_kv_heads: 64 are more than the 32 heads"):
        _read("llama-2-7b", num_key_value_heads=64)
    with pytest.raises(InvalidRequestError, match="top_k: 9 is more than the 8 experts"):
        _read("mixtral-8x7b", num_experts_per_tok=9)


def _write(folder: Path, content: str, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_a_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    content = json.dumps(CONFIGS_OF_PRESETS["qwen3-8b"])
    path = _write(tmp_path / "my-model", content)
    expected = dataclasses.replace(find_model("qwen3-8b"), name="my-model", aliases=())
    assert expected == load_hf_config(path) == load_hf_config(path.parent)
    assert expected == load_model(str(path)) == load_model(str(path.parent))


def test_a_file_of_another_name_names_its_model(tmp_path: Path) -> None:
    path = _write(tmp_path, json.dumps(CONFIGS_OF_PRESETS["qwen3-8b"]), "candidate.json")
    assert "candidate" == load_model(str(path)).name


@pytest.mark.parametrize(
    ("content", "expected"), [("{", "is not JSON"), ("[1]", "holds no JSON object")]
)
def test_a_file_that_is_no_config_is_an_error(tmp_path: Path, content: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        load_hf_config(_write(tmp_path, content))


def test_a_preset_wins_over_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "tiny-llama", json.dumps(CONFIGS_OF_PRESETS["qwen3-8b"]))
    monkeypatch.chdir(tmp_path)
    assert find_model("tiny-llama") == load_model("tiny-llama")
    assert 36 == load_model("./tiny-llama").num_layers
