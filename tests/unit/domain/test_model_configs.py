"""Configurations of current models: all are read, with the parameters their cards publish.

The files are those of Hugging Face repositories, in `../shared/data/model_configs`.
"""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS_OF_PRESETS
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.hf_config import architecture_of_hf_config, load_hf_config
from foretoken.domain.models.hf_reader import is_inert_key
from foretoken.domain.models.parameters import ParameterCount, count_parameters
from foretoken.domain.models.stack import stack_of

_FOLDER = Path(__file__).resolve().parents[4] / "shared/data/model_configs"
_FILES = sorted(
    path for path in _FOLDER.glob("*_config.json") if not path.stem.endswith("hf_quant_config")
)
_needs_files = pytest.mark.skipif(not _FILES, reason="the models' configurations are not here")

# What names and cards publish, of the language model: total, and after A what is active of it.
# By the beginning of a repository's name; the longest counts. Step-3.7-Flash has 196B besides its
# encoder of 1.8B (vLLM's recipe), Nemotron 3 Nano 31.58B by llama.cpp's count of its GGUF file; the
# abstract of Nemotron 3 Super rounds to 120B and 12B.
_PUBLISHED = {
    "DeepSeek-": "671B-A37B",
    "DeepSeek-V4-Flash": "284B-A13B",
    "DeepSeek-V4-Pro": "1.6T-A49B",
    "GLM-5": "744B-A40B",
    "Gemma-4-26B": "25.2B-A3.8B",
    "Gemma-4-31B": "30.7B",
    "gemma-4-26B": "25.2B-A3.8B",
    "Kimi-K2": "1T-A32B",
    "Llama-3.1-70B": "70.6B",
    "Llama-3_3-Nemotron-Super-49B": "49.9B",
    # The card's 109B has the encoder of images, which the file leaves out.
    "Llama-4-Scout-17B-16E": "107.8B-A17B",
    "Llama-4-Maverick-17B-128E": "400B-A17B",
    "Meta-Llama-3.1-8B": "8B",
    "Meta-Llama-3.1-70B": "70.6B",
    "Meta-Llama-3.1-405B": "405B",
    "MiMo-7B": "7.6B",
    "MiMo-V2-Flash": "309B-A15B",
    "MiniMax-M2": "229B-A10B",
    "Mixtral-8x7B": "46.7B-A12.9B",
    "Mixtral-8x22B": "141B-A39B",
    "NVIDIA-Nemotron-3-Nano": "31.6B-A3.2B",
    "NVIDIA-Nemotron-3-Super": "120.6B-A12.7B",
    "NVIDIA-Nemotron-3-Ultra": "550B-A55B",
    "NVIDIA-Nemotron-3.5-Lightning": "31.6B-A3.2B",
    "Nemotron-H-56B": "56B",
    "Qwen3-0.6B": "0.6B",
    "Qwen3-1.7B": "1.7B",
    "Qwen3-8B": "8.2B",
    "Qwen3-32B": "32.8B",
    "Qwen3-30B-A3B": "30.5B-A3.3B",
    "Qwen3-235B-A22B": "235B-A22B",
    "Qwen3-Coder-480B-A35B": "480B-A35B",
    "Qwen3-VL-2B": "2B",
    "Qwen3-VL-4B": "4B",
    "Qwen3-VL-8B": "8B",
    "Qwen3-VL-32B": "33B",
    "Qwen3-VL-30B-A3B": "30.5B-A3.3B",
    "Qwen3-VL-235B-A22B": "235B-A22B",
    "Qwen3.5-27B": "27B",
    "Qwen3.5-35B-A3B": "35B-A3B",
    "Qwen3.5-122B-A10B": "122B-A10B",
    "Qwen3.5-397B-A17B": "397B-A17B",
    "Qwen3.6-27B": "27B",
    "Qwen3.6-35B-A3B": "35B-A3B",
    "Step-3.7-Flash": "196B-A11B",
    "gpt-oss-20b": "20.9B-A3.6B",
    "gpt-oss-120b": "116.8B-A5.1B",
}
# Parameters that the modelling files of transformers 5.23 make of these configurations, without
# encoders of images. Not all of a model is in them where a published total is larger.
_COUNTED = {
    "deepseek-ai--DeepSeek-V3.2": 671_877_929_216,
    "deepseek-ai--DeepSeek-V4-Flash": 284_332_230_231,
    "deepseek-ai--DeepSeek-V4-Pro": 1_572_997_179_491,
    "MiniMaxAI--MiniMax-M2.5": 228_689_748_992,
    "Qwen--Qwen3.5-397B-A17B": 396_346_350_336,
    "Qwen--Qwen3.5-27B": 26_895_998_464,
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": 400_711_848_960,
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": 107_769_861_120,
    "nvidia--GLM-5-NVFP4": 743_911_199_232,
    "zai-org--GLM-5.2": 743_377_000_704,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_937_344,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120_668_687_360,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549_308_968_960,
    "nvidia--Nemotron-H-56B-Base-8K": 56_324_350_464,
    "XiaomiMiMo--MiMo-V2-Flash": 308_778_768_832,
}


def _repository(path: Path) -> str:
    return path.name.removesuffix("_config.json")


@cache
def _model(path: Path) -> ModelArchitecture:
    return load_hf_config(path)


def _language(model: ModelArchitecture) -> tuple[ParameterCount, int]:
    count = count_parameters(model)
    encoders = sum(part.total for part in count.parts if part.part.kind == "encoder")
    return count, count.total - encoders


def _agrees(published: str, found: float, tolerance: float) -> bool:
    """Whether a number is what is published, to the digits that are, or within the tolerance."""
    number, unit = float(published[:-1]), {"B": 1e9, "T": 1e12}[published[-1]]
    digits = len(published[:-1].partition(".")[2])
    return abs(found - number * unit) <= max(tolerance * number * unit, 0.5 * unit / 10**digits)


@_needs_files
def test_every_configuration_is_read() -> None:
    assert 86 == len(_FILES)
    for path in _FILES:
        model = _model(path)
        assert model.num_layers == len(stack_of(model).layers)


@_needs_files
@pytest.mark.parametrize("path", _FILES, ids=_repository)
def test_parameters_are_those_that_are_published(path: Path) -> None:
    """Totals within 0.5 %, active ones within 2 % by one of the conventions of the field.

    Active parameters are published with both embeddings, without that of the input, or without
    either.
    """
    name = _repository(path).partition("--")[2]
    known = [start for start in _PUBLISHED if name.startswith(start)]
    if not known:
        assert name.startswith(("Kimi-K3", "MiniMax-M3"))
        pytest.skip("no published number is known")
    total, _, active = _PUBLISHED[max(known, key=len)].partition("-A")
    count, language = _language(_model(path))
    assert _agrees(total, language, 0.005), language
    whole = count.active_total
    conventions = [whole, whole - count.embedding, whole - count.embedding - count.lm_head]
    assert not active or any(_agrees(active, found, 0.02) for found in conventions), conventions


@_needs_files
@pytest.mark.parametrize("repository", sorted(_COUNTED))
def test_parameters_are_those_of_the_modelling_files(repository: str) -> None:
    _, language = _language(_model(_FOLDER / f"{repository}_config.json"))
    assert pytest.approx(_COUNTED[repository], rel=1e-5) == language


@_needs_files
def test_presets_are_the_configurations_of_their_repositories() -> None:
    """There is one for every file that is here, and it says the same, format included."""
    for path in _FILES:
        preset = find_model(_repository(path).replace("--", "/", 1))
        found = dataclasses.replace(_model(path), name=preset.name)
        assert dataclasses.replace(preset, aliases=()) == found, path.name


# Keys that say again what others of the same file say, or that no operator of a step depends on.
_SAID_TWICE = {
    # repeated by a list of layers, by a switch that is off, or by the rest of the heads
    *("first_k_dense_replace", "moe_intermediate_size", "n_shared_experts", "num_mtp_modules"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "full_attention_interval"),
    *("sliding_window_size", "attention_chunk_size", "vocab_size_per_layer_input", "num_experts"),
    *("intermediate_size_mlp", "num_key_value_heads", "head_dim", "qk_head_dim", "expand"),
    *("index_skip_topk_offset", "index_topk_freq", "intermediate_size", "tie_word_embeddings"),
    *("qk_norm_type", "attention_bias"),
    # of layers that predict further tokens, of the inside of a kernel, of a norm without weights
    *("use_mtp", "mtp_transformer_layers", "mtp_use_dedicated_embeddings", "mamba_hidden_act"),
    *("index_share_for_mtp_iteration", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    *("chunk_size", "num_hash_layers", "use_qk_norm", "latent_moe_use_norm"),
}


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value + 2
    if isinstance(value, list):
        return value[1:]
    return f"other {value}"


@_needs_files
@given(data=st.data())
def test_a_change_of_a_configuration_is_an_error_or_another_model(data: st.DataObject) -> None:
    """Nothing that changes operators is passed over, nor is a key that nobody knows."""
    path = data.draw(st.sampled_from(_FILES))
    config = json.loads(path.read_text())
    place = config.get("text_config", config)
    keys = [key for key in place if not is_inert_key(key) and not isinstance(place[key], dict)]
    key = data.draw(st.sampled_from(sorted(keys)))
    place[key] = _changed(place[key])
    if place[key] in (None, [], "") or key in _SAID_TWICE:
        return
    name = path.name.removesuffix(".json")
    try:
        found = architecture_of_hf_config(config, name)
    except InvalidRequestError:
        return
    before = architecture_of_hf_config(json.loads(path.read_text()), name)
    assert before != found, key


@given(
    preset=st.sampled_from(sorted(CONFIGS_OF_PRESETS)),
    key=st.from_regex(r"\A[a-z]{3,8}_(size|layers|heads|type)\Z"),
    value=st.sampled_from([4, True, "linear", [1, 2], {"a": 1}]),
)
def test_a_key_that_nobody_knows_is_an_error(preset: str, key: str, value: Any) -> None:
    config = CONFIGS_OF_PRESETS[preset]
    if key in config or is_inert_key(key) or re.search("(hidden|num|rope|tensor)_", key):
        return
    with pytest.raises(InvalidRequestError) as caught:
        architecture_of_hf_config({**config, key: value}, preset)
    assert [key] == [violation.field for violation in caught.value.violations]
