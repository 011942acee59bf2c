"""Read text and JSON that people and other programs made."""

import json
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder; none is there by a name that no file can have."""
    try:
        return path.exists()
    except OSError:
        return False


def find_named_file(folder: Path, name: str, field: str) -> Path:
    """Return the path that a file in a folder names: `~` is a home, the rest relative to it.

    Raises:
        InvalidRequestError: it is in the home of nobody.

    """
    try:
        return folder / Path(name).expanduser()
    except RuntimeError as err:
        raise InvalidRequestError.of_field(field, f"{name}: {err}") from err


def read_text(path: Path, field: str) -> str:
    """Return a file's text in UTF-8; `field` is what an error is about.

    Raises:
        InvalidRequestError: it cannot be read, or is in something else; names the byte.

    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise InvalidRequestError.of_field(
            field, f"{path} is not UTF-8 text: {err.reason} at byte {err.start}"
        ) from err
    except (OSError, ValueError) as err:  # a null in the name is a ValueError
        reason = err.strerror if isinstance(err, OSError) else ""
        raise InvalidRequestError.of_field(field, f"cannot read {path}: {reason or err}") from err


def parse_json(text: str | bytes, field: str, origin: str = "") -> Any:
    """Return the value in a JSON text; `origin` says where it is from, as a file's name does.

    Raises:
        InvalidRequestError: it is no JSON, not UTF-8, or nested too deep.

    """
    place = f"{origin} " if origin else ""
    try:
        return json.loads(text)
    except RecursionError as err:
        raise InvalidRequestError.of_field(field, f"{place}is JSON nested too deep") from err
    except ValueError as err:
        raise InvalidRequestError.of_field(field, f"{place}is not JSON: {err}") from err


def read_json(path: Path, field: str) -> Any:
    """Return the value in a JSON file; `field` is what an error is about.

    Raises:
        InvalidRequestError: as `read_text` and `parse_json`.

    """
    return parse_json(read_text(path, field), field, str(path))
