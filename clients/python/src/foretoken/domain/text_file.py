"""Read text and JSON that people and other programs made."""

import json
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError


def read_text(path: Path, field: str) -> str:
    """Return a file's text in UTF-8; `field` is what an error is about.

    Raises:
        InvalidRequestError: it cannot be read, or is in something else; names the byte.

    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as err:
        raise InvalidRequestError.of_field(
            field, f"cannot read {path}: {err.strerror or err}"
        ) from err
    except UnicodeDecodeError as err:
        raise InvalidRequestError.of_field(
            field, f"{path} is not UTF-8 text: {err.reason} at byte {err.start}"
        ) from err


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
