"""What `quantization_config` and `hf_quant_config.json` say a checkpoint is stored in."""

import json
from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS_OF_PRESETS

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.checkpoint_format import CheckpointFormat, read_checkpoint_format
from foretoken.domain.models.hf_config import architecture_of_hf_config, load_hf_config

_NAMES = {
    "attention": ("self_attn.q_proj", "self_attn.o_proj"),
    "latent": ("self_attn.q_a_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    "mlp": ("mlp.up_proj", "mlp.down_proj"),
    "shared_experts": ("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    "experts": ("mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
}


def _parts(**layers: range) -> dict[str, list[str]]:
    return {
        part: [f"model.layers.{layer}.{name}" for layer in held for name in _NAMES[part]]
        for part, held in layers.items()
    }


_ROUTED_LAYERS = {"shared_experts": range(1, 4), "experts": range(1, 4)}
_DENSE = _parts(attention=range(4), mlp=range(4))
_ROUTED = _parts(attention=range(4), mlp=range(1), **_ROUTED_LAYERS)
_LATENT = _parts(latent=range(4), mlp=range(1), experts=range(1, 4))


def _read(parts: dict[str, list[str]], **stored: Any) -> str:
    return read_checkpoint_format({"quantization_config": stored}, parts).quantization


def _linear(weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, **group}}


@pytest.mark.parametrize(
    ("stored", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_static"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4_wo"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8_wo"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4_wo_g64"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_static"),
        ({"quant_algo": "W4A16_AWQ"}, "int4_wo"),
    ],
)
def test_one_scheme_of_all_matrices_is_known_by_its_name(
    stored: dict[str, Any], scheme: str
) -> None:
    assert scheme == _read(_DENSE, **stored)


@pytest.mark.parametrize(
    ("weights", "group", "scheme"),
    [
        ({"type": "float", "num_bits": 8, "strategy": "block"}, {}, "fp8_block"),
        ({"type": "float", "num_bits": 8}, {"input_activations": {"dynamic": True}}, "fp8"),
        ({"type": "float", "num_bits": 8}, {"input_activations": {"dynamic": False}}, "fp8_static"),
        ({"type": "int", "num_bits": 8}, {"input_activations": {"dynamic": True}}, "sq"),
        ({"type": "int", "num_bits": 4, "group_size": 32}, {}, "int4_wo_g32"),
        ({"type": "float", "num_bits": 4, "group_size": 16}, {"input_activations": {}}, "nvfp4_wo"),
    ],
)
def test_groups_of_compressed_tensors(
    weights: dict[str, Any], group: dict[str, Any], scheme: str
) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": _linear(weights, **group)}
    assert scheme == _read(_DENSE, **config)


def test_what_is_left_out_is_left_out_by_name_prefix_glob_and_expression() -> None:
    groups = _linear({"type": "int", "num_bits": 4, "group_size": 32})
    only_experts = [
        *("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
    ]
    stored = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert "experts=int4_wo_g32" == _read(_ROUTED, **stored, ignore=only_experts)
    globs = ["language_model.model.layers.*.self_attn*", "*.mlp.shared_expert.*"]
    stored = {"quant_algo": "NVFP4", "ignore": globs}
    assert "mlp=nvfp4+experts=nvfp4" == _read(_ROUTED, **stored)
    names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qo"]
    stored = {"quant_method": "fp8", "modules_to_not_convert": names}
    assert "mlp=fp8" == _read(_DENSE, **stored)
    stored = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]}
    assert "fp8" == _read(_DENSE, **stored)


def test_mixed_precision_names_its_layers() -> None:
    layers = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4"} for i in range(1, 4)}
    layers["model.layers.0.mlp.up_proj"] = {"quant_algo": "FP8"}
    layers["model.layers.0.mlp.down_proj"] = {"quant_algo": "FP8"}
    stored = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert "mlp=fp8_static+experts=nvfp4" == _read(_ROUTED, **stored)


def test_schemes_that_store_parts_alike_are_known_by_one_name() -> None:
    excluded = ["*.self_attn.q_a_proj", "*.self_attn.q_b_proj", "*.self_attn.kv_b_proj"]
    stored = {"quant_algo": "NVFP4", "exclude_modules": excluded}
    assert "nvfp4" == _read(_LATENT, **stored)
    assert "mxfp4" == _read(_ROUTED, quant_method="mxfp4", modules_to_not_convert=["lm_head"])


def test_the_file_of_modelopt_says_it_where_the_configuration_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    config = CONFIGS_OF_PRESETS["llama-2-7b"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "" == load_hf_config(folder).quantization
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    model = load_hf_config(folder)
    assert ("fp8_static", DType.FP8) == (model.quantization, model.kv_dtype)


@pytest.mark.parametrize(
    ("stored", "key"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 3}, "bits"),
        ({"quant_method": "gptq", "bits": [4]}, "bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, "group_size"),
        ({"quant_algo": "MXFP6"}, "quant_algo"),
        ({"quant_algo": "FP8", "kv_cache_scheme": "INT8"}, "kv_cache_scheme"),
        ({"quant_algo": ["FP8"]}, "quant_algo"),
        ({"quant_method": "fp8", "ignore": 1}, "ignore"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, "ignore"),
        ({"quant_method": "fp8", "ignore": ["re:(.+)+x"]}, "ignore"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, ""),
    ],
)
def test_what_is_not_known_is_refused(stored: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _read(_DENSE, **stored)
    field = f"quantization_config.{key}".rstrip(".")
    assert [field] == [violation.field for violation in caught.value.violations]


def test_a_configuration_without_quantisation_is_stored_as_it_is() -> None:
    assert CheckpointFormat() == read_checkpoint_format({}, _DENSE)
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    assert "fp8" == read_checkpoint_format(nested, _DENSE).quantization


def test_an_unknown_method_refuses_the_model() -> None:
    config = {**CONFIGS_OF_PRESETS["llama-2-7b"], "quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(InvalidRequestError, match="'hqq' is none of"):
        architecture_of_hf_config(config, "llama")


_PUBLISHED = {
    "Qwen--Qwen3-235B-A22B-FP8": ("fp8_block", None),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": ("fp8_static", DType.FP8),
    "deepseek-ai--DeepSeek-R1": ("fp8_block", None),
    "moonshotai--Kimi-K2-Instruct": ("fp8_block", None),
    "nvidia--DeepSeek-V3.1-NVFP4": ("nvfp4", DType.FP8),
    "nvidia--Llama-3.1-70B-Instruct-FP8": ("fp8_static", DType.FP8),
    "nvidia--Qwen3-235B-A22B-NVFP4": ("nvfp4", DType.FP8),
    "openai--gpt-oss-120b": ("mxfp4", None),
    "Qwen--Qwen3-32B": ("", None),
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_checkpoints_are_read_as_they_are_stored(shared_data: Path, name: str) -> None:
    model = load_hf_config(shared_data / "model_configs" / f"{name}_config.json")
    assert _PUBLISHED[name] == (model.quantization, model.kv_dtype)
