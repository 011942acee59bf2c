"""Find a model by preset name, by Hugging Face repository, or in a file."""

from pathlib import Path

from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.hf_config import load_hf_config
from foretoken.domain.text_file import is_there


def load_model(name_or_path: str) -> ModelArchitecture:
    """Return a preset by name or alias, else the model of a `config.json` or of its folder.

    A preset wins over a folder of the same name; `./name` is always the folder.

    Raises:
        UnknownModelError: neither a preset nor a path; the message names the nearest presets.
        InvalidRequestError: the file is missing, or its model cannot be simulated.

    """
    try:
        return find_model(name_or_path)
    except UnknownModelError:
        path = Path(name_or_path)
        if is_there(path):
            return load_hf_config(path)
        if path.suffix == ".json":
            raise InvalidRequestError.of_field("model", f"there is no file {path}") from None
        raise
