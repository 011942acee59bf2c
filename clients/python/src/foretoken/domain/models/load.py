"""Find a model by preset name, by Hugging Face repository, in a file, or in a file's text.

Files are a `config.json`, a GGUF file, or the JSON of layers in a pattern with a preset's keys.
"""

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.gguf_config import load_gguf
from foretoken.domain.models.hf_config import architecture_of_hf_config, load_hf_config
from foretoken.domain.text_file import is_there, parse_json_texts, read_json

# What says which model it is: itself, a name, a path or the text of a `config.json`.
ModelName = ModelArchitecture | str | Path
# The default of a `ModelField`, which is none: checkers know what a field takes only where it is
# given something.
REQUIRED: Any = MISSING
_GGUF = ".gguf"
# The key of a `hf_quant_config.json` that says how weights are stored.
_STORED = "quantization"

if TYPE_CHECKING:

    class ModelField:
        """A request's field that takes any `ModelName` and holds the model, as checkers see it."""

        def __get__(self, request: object, owner: type | None = None) -> ModelArchitecture:
            """Return the model."""

        def __set__(self, request: object, value: ModelName) -> None:
            """Take what says which model it is."""

else:
    # To Python, and to what decodes requests by their annotations, it holds a model.
    ModelField = ModelArchitecture


def settle_model(request: object, field: str = "model") -> None:
    """Put the model into a field of a frozen dataclass that is being made, where a name was given.

    Raises:
        UnknownModelError, InvalidRequestError: as `load_model`.

    """
    given: ModelName = getattr(request, field)
    if not isinstance(given, ModelArchitecture):
        object.__setattr__(request, field, load_model(given))


def load_model(name: str | Path) -> ModelArchitecture:
    """Return a preset by name or alias, else the model of a file or folder.

    Files are a `config.json`, a GGUF file and the JSON that `foretoken profile graph` writes,
    folders those of a `config.json`.
    A preset wins over a folder of the same name; `./name` is always the folder. The text of a
    `config.json` is the model it describes; that of its `hf_quant_config.json` may follow it.

    Raises:
        UnknownModelError: neither a preset nor a path; the message names the nearest presets.
        InvalidRequestError: the file is missing, or its model cannot be simulated.

    """
    if isinstance(name, Path):
        return _load_file(name)
    if name.lstrip().startswith("{"):
        texts = parse_json_texts(name, "model")
        if not all(isinstance(text, Mapping) for text in texts):
            raise InvalidRequestError.of_field("model", "is the text of a config.json: {...}")
        stored = [text for text in texts if _STORED in text and "model_type" not in text]
        configs = [text for text in texts if text not in stored] or stored
        if len(configs) > 1 or len(stored) > 1:
            raise InvalidRequestError.of_field("model", "is the text of more than one model")
        if _is_own(configs[0]):
            return _decode(configs[0], "model")
        return architecture_of_hf_config(configs[0], _name_in(configs[0]), *stored)
    try:
        return find_model(name)
    except UnknownModelError as err:
        path = Path(name)
        if is_there(path):
            return _load_file(path)
        if path.suffix in (".json", _GGUF):
            raise InvalidRequestError.of_field("model", f"there is no file {path}") from None
        advice = "any other model is read from its Hugging Face config.json: give its path"
        raise UnknownModelError(f"{err.message} {advice}", **err.details) from None


def find_folder(name: str) -> Path | None:
    """Return the folder that `load_model` reads a name from; None of a preset, a text or a file."""
    try:
        find_model(name)
    except UnknownModelError:
        path = Path(name)
        folder = path.parent if path.name == "config.json" else path
        return folder if is_there(folder) and folder.is_dir() else None
    return None


def _load_file(path: Path) -> ModelArchitecture:
    if path.suffix == _GGUF:
        return load_gguf(path)
    if path.suffix == ".json" and not path.is_dir():
        content = read_json(path, "model")
        if isinstance(content, Mapping) and _is_own(content):
            return _decode(content, path.stem)
    return load_hf_config(path)


def _is_own(content: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object has the keys of presets, as graphs of models are written."""
    return "pattern" in content and "model_type" not in content


def _decode(content: Mapping[str, Any], name: str) -> ModelArchitecture:
    return schema.decode(ModelArchitecture, {"name": name, **content}, f"model {name}")


def _name_in(config: Mapping[str, object]) -> str:
    """Return the repository that a configuration names, or else its kind of model."""
    return str(config.get("_name_or_path") or config.get("model_type", "model"))
