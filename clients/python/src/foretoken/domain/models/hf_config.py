"""Read a model's architecture from its Hugging Face `config.json`.

Each model type is one function that says which keys it has and what they mean. Keys of training,
tokens and numerics are ignored (`hf_reader.py`); any other that the function did not look at is an
error, so that no model is simulated as another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.checkpoint_format import read_checkpoint_format
from foretoken.domain.models.hf_multimodal import MULTIMODAL, TEXT_MODELS
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.kinds.spec.kind import find_kind
from foretoken.domain.models.stack import stack_of, weights_of
from foretoken.domain.text_file import is_there, read_json

# Where a family's checkpoints have the modules of a part, if not where most have them.
_MODULES = {"gemma4": (".mlp.experts.", ".experts.")}
# What engines keep keys and values in whatever the checkpoint says: DeepSeek-V4's cache has no
# layout of 16 bits. Source: vLLM, pull request 55134 (`auto` is `fp8_ds_mla`).
_CACHED_IN = {"deepseek_ref": DType.FP8, "deepseek_v4": DType.FP8, "deepseek_v41": DType.FP8}
# Every model type that is read.
_READERS = {**TEXT_MODELS, **MULTIMODAL}


def architecture_of_hf_config(
    config: Mapping[str, Any], name: str, modelopt: object = None
) -> ModelArchitecture:
    """Return the architecture that a parsed `config.json` describes.

    `modelopt` is the parsed `hf_quant_config.json` next to it, None without one.

    Raises:
        InvalidRequestError: its model type is not supported, a key is missing or has a value that
            cannot be simulated; with one violation per key.
        UnknownPluginError: its weights are stored in a scheme there is not.

    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        supported = ", ".join(sorted(_READERS))
        why = f"{model_type!r} of {name} is not supported; supported are {supported}"
        text = config.get("text_config")
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        if inner in TEXT_MODELS:
            why = f"{model_type!r} of {name} is not supported, its text model {inner!r} alone is:"
            why += " give what text_config has as a file of its own"
        raise InvalidRequestError.of_field("model_type", why)
    reader = ConfigReader(config)
    fields = _READERS[model_type](reader)
    reader.refuse_unread(model_type)
    if reader.violations:
        raise InvalidRequestError.of_violations(reader.violations, f"{model_type} config of {name}")
    model = ModelArchitecture(name=name, **fields)
    usual, own = _MODULES.get(model_type, ("", ""))
    parts = {
        part: [name.replace(usual, own) if usual else name for name in names]
        for part, names in _matrices(model).items()
    }
    stored = read_checkpoint_format(config, parts, modelopt)
    kv_dtype = _CACHED_IN.get(model_type) if stored.kv_dtype is None else stored.kv_dtype
    return replace(model, quantization=stored.quantization, kv_dtype=kv_dtype)


def _matrices(model: ModelArchitecture) -> Mapping[str, Sequence[str]]:
    """Return matrices of each part that a checkpoint may store in its own way, by full name."""
    found: dict[str, list[str]] = {}
    for part, layers in stack_of(model).parts:
        of_kind = find_kind(part.kind).matrices
        for weights in weights_of(part, model):
            names = of_kind.get(weights.part, ())
            found.setdefault(weights.part, []).extend(
                f"model.layers.{layer}.{name}" for layer in layers for name in names
            )
    return {part: list(dict.fromkeys(names)) for part, names in found.items() if names}


def load_hf_config(path: Path) -> ModelArchitecture:
    """Read a `config.json`, or the one in a folder; the model is named after the folder.

    How its weights are stored is read from it, or from the `hf_quant_config.json` next to it.

    Raises:
        InvalidRequestError: no such file, not JSON, or not a model that can be simulated.

    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "model")
    if not isinstance(config, Mapping):
        raise InvalidRequestError.of_field("model", f"{file} holds no JSON object")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    sibling = file.with_name(file.name.replace("config.json", "hf_quant_config.json"))
    modelopt = read_json(sibling, "model") if sibling != file and is_there(sibling) else None
    return architecture_of_hf_config(config, name, modelopt)
