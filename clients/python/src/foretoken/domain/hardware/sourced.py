"""Numbers in the data files carry their source: `{value: 933.0e9, source: datasheet}`."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.plugins import read_yaml, scan_yaml

T = TypeVar("T")
_OWN_VARIABLE = "FORETOKEN_HARDWARE"


def load_sourced(cls: type[T], folder: str) -> dict[str, T]:
    """Return every file of a data folder next to this module as `cls`, by name, sources checked.

    Raises:
        InvalidRequestError: a file that cannot be used; the message names it.

    """
    return {
        stem: schema.decode(
            cls,
            {"name": stem, **strip_sources(content, f"{folder}/{stem}.yaml")},
            f"{folder}/{stem}.yaml",
        )
        for stem, content in read_folder(folder).items()
    }


@cache
def read_folder(folder: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the content of every file of a data folder next to this module, by name.

    Files in a folder of that name under `FORETOKEN_HARDWARE` come along, and win over ours.

    Raises:
        InvalidRequestError: there is no such folder as the variable says, or a file is no YAML.

    """
    found = dict(scan_yaml("foretoken.domain.hardware", folder))
    if own := os.environ.get(_OWN_VARIABLE):
        root = Path(own).expanduser()
        if not root.is_dir():
            raise InvalidRequestError.of_field(_OWN_VARIABLE, f"{root} is no folder")
        paths = sorted((root / folder).glob("*.yaml"))
        found |= {path.stem: read_yaml(path, _OWN_VARIABLE) for path in paths}
    return found


def strip_sources(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the content with every `{value, source}` replaced by its value.

    Raises:
        InvalidRequestError: a number without a source, or a source the file does not list under
            `sources`.

    """
    sources = content.get("sources", {})
    violations: list[FieldViolation] = []
    stripped = {
        key: _strip(item, key, sources, violations)
        for key, item in content.items()
        if key != "sources"
    }
    if violations:
        raise InvalidRequestError.of_violations(violations, origin)
    return stripped


def _strip(
    item: Any, path: str, sources: Mapping[str, str], violations: list[FieldViolation]
) -> Any:
    if isinstance(item, Mapping) and set(item) == {"value", "source"}:
        if item["source"] not in sources:
            violations.append(FieldViolation(path, f"source {item['source']!r} is not listed"))
        return item["value"]
    if isinstance(item, Mapping):
        return {key: _strip(i, f"{path}.{key}", sources, violations) for key, i in item.items()}
    if isinstance(item, int | float) and not isinstance(item, bool):
        violations.append(FieldViolation(path, "a number needs {value, source}"))
    return item
