"""What is written as a `config.json`, and what is read of one."""

import json
from dataclasses import replace

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import all_models, find_model
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.profiler.closure.hf_config import config_of_architecture
from foretoken.profiler.closure.hf_model import read_config

_LAYERED = [name for name, model in all_models().items() if model.layers]


@pytest.mark.parametrize("name", sorted(set(all_models()) - {*_LAYERED}))
def test_a_written_config_reads_back_as_the_architecture(name: str) -> None:
    """Every preset has a config, and it is of no other model."""
    model = find_model(name)
    content = json.loads(json.dumps(config_of_architecture(model)))
    in_16_bits = replace(model, aliases=(), quantization="", kv_dtype=None, extras=())
    assert in_16_bits == architecture_of_hf_config(content, name)


def test_a_bias_of_queries_keys_and_values_alone_is_not_written_as_llamas() -> None:
    """Llama's `attention_bias` would add one to the output, too."""
    assert "qwen2" == config_of_architecture(find_model("qwen2-0.5b"))["model_type"]


@pytest.mark.parametrize("name", _LAYERED)
def test_layers_in_a_pattern_need_a_config_of_their_own(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="give its own config"):
        config_of_architecture(find_model(name))


def test_what_no_model_type_has_is_refused() -> None:
    """Learned positions with a gated MLP are no model of the library."""
    model = replace(find_model("gpt2-xl"), is_gated=True)
    with pytest.raises(InvalidRequestError, match="give its own config"):
        config_of_architecture(model)


def test_how_a_checkpoint_was_stored_is_dropped() -> None:
    """A quantised checkpoint's config builds a plain model."""
    text = json.dumps({"model_type": "llama", "quantization_config": {}, "torch_dtype": "float16"})
    assert {"model_type": "llama"} == read_config(text, "m")


def test_a_shorter_model_has_fewer_layer_types() -> None:
    """Lists by layer are cut with the layers."""
    config = {
        "model_type": "x",
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "a", "b"],
    }
    expected = {"model_type": "x", "num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert expected == read_config(json.dumps(config), "m", num_layers=2)


@pytest.mark.parametrize(
    ("text", "num_layers", "message"),
    [
        ("{", 0, "is not JSON"),
        ("[]", 0, "no JSON object"),
        ('{"n_layer": 2}', 3, "m has 2 layers"),
        ("{}", 1, "m has no number of layers"),
    ],
)
def test_configs_that_cannot_be_used_are_refused(text: str, num_layers: int, message: str) -> None:
    """The message says what is wrong."""
    with pytest.raises(InvalidRequestError, match=message):
        read_config(text, "m", num_layers)
