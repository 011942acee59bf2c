"""What a built model is read as: layers of kinds, with as many parameters as it holds."""

import json
from pathlib import Path

import pytest
import torch
from graph_models import CONFIGS, config_json, graph_request, profile
from torch import nn

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.load import load_model
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.stack import stack_of
from foretoken.profiler.graph.architecture import read_architecture
from foretoken.profiler.graph.model import ModelShape, outline_model, read_model_config

_LLAMA_LIKE = {**CONFIGS["llama"], "head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OTHERS = {
    "gpt_oss": {
        **_LLAMA_LIKE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {
        **_LLAMA_LIKE,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        **_LLAMA_LIKE,
        **_MOE,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v3": {
        **_LLAMA_LIKE,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_group": 1,
    },
    "nemotron_h": {
        **_LLAMA_LIKE,
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M-*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
}
_ALL = {**CONFIGS, **_OTHERS}
# Attention and MLP of these run next to each other.
_PARALLEL = ("phi", "gpt_neox")


def _outline(family: str) -> tuple[nn.Module, object]:
    text = json.dumps({**_ALL[family], "model_type": family})
    config = read_model_config(graph_request("llama", config_json=text))
    num_layers = config.num_hidden_layers
    shape = ModelShape(config=config, num_layers=num_layers, num_ranks=1, dtype=torch.float32)
    return outline_model(shape, family), config


def _read(family: str) -> ModelArchitecture:
    return read_architecture(*_outline(family), family)


@pytest.mark.parametrize("family", [name for name in _ALL if name not in _PARALLEL])
def test_a_model_has_the_parameters_of_its_kinds(family: str) -> None:
    model, _ = _outline(family)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert pytest.approx(held, rel=5e-3) == count_parameters(_read(family)).total


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_modules_and_configuration_say_the_same(family: str) -> None:
    text = json.dumps({**_ALL[family], "model_type": family})
    known, read = (stack_of(model) for model in (load_model(text), _read(family)))
    sinks = int(family == "gpt_oss")
    assert [mixer.changed(has_sinks=sinks) for mixer in known.mixers] == list(read.mixers)
    assert list(known.mixers.values()) == list(read.mixers.values())
    assert known.feed_forwards == read.feed_forwards


def test_layers_are_kinds_in_a_pattern() -> None:
    assert "3*kind-0 kind-1" == _read("qwen3_next").pattern
    delta, full = stack_of(_read("qwen3_next")).mixers
    assert ("gated_delta", 4, 16) == (delta.kind, delta["num_value_heads"], delta["value_head_dim"])
    assert ("attention", 4, 1, 1) == (full.kind, full["num_heads"], full["gate"], full["qk_norm"])
    mamba, plain = stack_of(_read("nemotron_h")).mixers
    assert ("mamba2", 8, 16) == (mamba.kind, mamba["num_heads"], mamba["state_dim"])
    assert "attention" == plain.kind
    (latent,) = stack_of(_read("deepseek_v3")).mixers
    assert ("latent", 24, 16) == (latent.kind, latent["q_lora_rank"], latent["kv_lora_rank"])
    dense, routed = stack_of(_read("deepseek_v3")).feed_forwards
    assert ("mlp", "experts", 32) == (dense.kind, routed.kind, routed["shared_intermediate"])
    assert [4, 0] == [part["window"] for part in stack_of(_read("gemma3_text")).mixers]


@pytest.mark.parametrize("family", _PARALLEL)
def test_parallel_branches_are_refused(family: str) -> None:
    with pytest.raises(InvalidRequestError, match="run next to each other"):
        _read(family)


def test_modules_of_no_kind_are_refused() -> None:
    model, config = _outline("llama")
    model.model.layers[1].adapter = nn.Linear(64, 640, device="meta")  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="its modules hold"):
        read_architecture(model, config, "llama")


@pytest.mark.slow
def test_a_profile_has_the_model_that_scenarios_read(tmp_path: Path) -> None:
    report = profile(graph_request("gemma2", has_backward=False), tmp_path)
    path = tmp_path / "gemma2.json"
    path.write_text(report.architecture_json)
    for model in (load_model(path), load_model(report.architecture_json)):
        assert ("gemma2", _read("gemma2").layers) == (model.name, model.layers)
    alone = profile(graph_request("phi", config_json=config_json("phi")), tmp_path)
    assert "" == alone.architecture_json
    assert any("no layers of kinds" in note for note in alone.notes)
