"""Build a Hugging Face model with random weights from its configuration alone."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.profiler.config_json import read_config_json, switch_off_dropout

_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function")
_ATTENTION = "sdpa"


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A model as it was built: the module, its architecture, and what the latter leaves open."""

    module: Any
    architecture: ModelArchitecture
    model_type: str
    activation: str

    @property
    def facts(self) -> dict[str, str]:
        """What decides which kernels run, in addition to the architecture."""
        import transformers

        return {
            "transformers": str(transformers.__version__),
            "model_type": self.model_type,
            "activation": self.activation,
            "attention": _ATTENTION,
            "dropout": "0",
        }


def read_config(config_json: str, name: str, num_layers: int = 0) -> Mapping[str, Any]:
    """Return the content of a `config.json` without what concerns a stored checkpoint.

    With `num_layers` it is of a model of that many layers.

    Raises:
        InvalidRequestError: it is no JSON object, or has fewer layers.

    """
    content = read_config_json(config_json)
    if num_layers:
        _shorten(content, name, num_layers)
    return content


def build_model(
    content: Mapping[str, Any], name: str, dtype: torch.dtype, device: torch.device
) -> HuggingFaceModel:
    """Return the model on the device, random weights in `dtype`, without dropout.

    Raises:
        InvalidRequestError: the library is not installed, or does not know the model.

    """
    architecture = architecture_of_hf_config(content, name)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as err:
        raise InvalidRequestError(
            "whole steps need the package transformers: pip install 'foretoken[graphs]'"
        ) from err
    # Its warnings are of generation and checkpoints.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    facts = dict(content)
    model_type = str(facts.pop("model_type"))
    try:
        config = AutoConfig.for_model(model_type, **facts)
        switch_off_dropout(config)
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_ATTENTION
            )
    except (ValueError, KeyError, TypeError) as err:
        raise InvalidRequestError.of_field("config_json", f"{name}: {err}") from err
    activation = next((str(facts[key]) for key in _ACTIVATION_KEYS if facts.get(key)), "")
    return HuggingFaceModel(
        module=module.to(device),
        architecture=architecture,
        model_type=model_type,
        activation=activation or str(getattr(config, "activation_function", "")),
    )


def _shorten(content: dict[str, Any], name: str, num_layers: int) -> None:
    key = next((key for key in _LAYER_KEYS if isinstance(content.get(key), int)), "")
    if not key or content[key] < num_layers:
        present = content.get(key, "no number of")
        raise InvalidRequestError.of_field("num_layers", f"{name} has {present} layers")
    content[key] = num_layers
    if isinstance(content.get("layer_types"), list):
        content["layer_types"] = content["layer_types"][:num_layers]
