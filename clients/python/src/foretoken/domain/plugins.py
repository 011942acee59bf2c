"""Find plug-ins: one file each in a folder of the package, or an entry point of another package.

This is the one module of the domain that reads YAML (see docs/adr/0005).
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.text_file import read_text

T = TypeVar("T")


@cache
def scan_modules(package: str, attribute: str) -> Mapping[str, Any]:
    """Return `attribute` of every module in `package`, by module name; looked for once a process.

    A plug-in may be a package; a package without the attribute holds what the others are made of.

    Modules of other distributions join through the entry-point group named like the package.

    Raises:
        InvalidRequestError: a module of the folder lacks the attribute.

    """
    # Takes a while to import, and nothing else here needs it.
    from importlib.metadata import entry_points

    found: dict[str, Any] = {}
    for module_info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{module_info.name}")
        if hasattr(module, attribute):
            found[module_info.name] = getattr(module, attribute)
        elif not module_info.ispkg:
            raise InvalidRequestError(f"plug-in {module.__name__} has no {attribute}")
    for entry_point in entry_points(group=package):
        found[entry_point.name] = entry_point.load()
    return dict(sorted(found.items()))


# PyYAML's in C, eight times faster, where it was built with it; its wheels are.
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(SAFE_LOADER):  # type: ignore[misc]
    """PyYAML's safe loader, and `165e12` is a number, as in YAML 1.2 and in JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


# What the loader lets through where a value is none of its kind (`!!int x`, a 32nd of January) or
# does not fit.
_UNLOADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Deeper than anything of ours. The loader in C recurses without a limit, and ends the process.
_DEPTH_MAX = 64
# Each level takes a bracket, or a character at the beginning of a line.
_DEEP_BLOCK = re.compile(rf"^[ \t?:-]{{{_DEPTH_MAX}}}", re.MULTILINE)


def parse_yaml(text: str, origin: str) -> Mapping[str, Any]:
    """Return the mapping in a YAML text.

    Raises:
        InvalidRequestError: not YAML, or not a mapping; the message names the origin and line.

    """
    try:
        _check_depth(text, origin)
        # The loader is a subclass of the safe one.
        content = yaml.load(text, Loader=_Loader)  # noqa: S506
    except (yaml.YAMLError, *_UNLOADABLE) as err:
        # The loader draws the place over several lines.
        problem = " ".join(str(err).split()) or type(err).__name__
        raise InvalidRequestError(f"{origin}: not valid YAML: {problem}") from err
    if not isinstance(content, Mapping):
        raise InvalidRequestError(f"{origin}: expected a mapping, found {type(content).__name__}")
    return content


def _check_depth(text: str, origin: str) -> None:
    if text.count("[") + text.count("{") < _DEPTH_MAX and _DEEP_BLOCK.search(text) is None:
        return
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH_MAX:
            raise InvalidRequestError(f"{origin}: YAML nested deeper than {_DEPTH_MAX}")


def parse_yaml_value(text: str, origin: str) -> Any:
    """Return the value a piece of YAML stands for: `4` is a number, `[1, 2]` a list.

    Raises:
        InvalidRequestError: not YAML; the message names the origin.

    """
    return parse_yaml(f"value: {text}", origin)["value"]


def read_yaml(path: Path, field: str) -> dict[str, Any]:
    """Return the mapping in a YAML file; `field` is what an error is about.

    Raises:
        InvalidRequestError: the file cannot be read, is not UTF-8 or is no YAML mapping.

    """
    return dict(parse_yaml(read_text(path, field), str(path)))


def scan_yaml(package: str, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (file stem, content) of every YAML file in a data folder of `package`."""
    for entry in sorted(files(package).joinpath(folder).iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            yield name, parse_yaml(entry.read_text(encoding="utf-8"), f"{folder}/{entry.name}")


def load_yaml_folder(cls: type[T], package: str, folder: str) -> dict[str, T]:
    """Return every YAML file in a data folder of `package` as `cls`, by its stem, its `name`.

    Raises:
        InvalidRequestError: a file that cannot be used; the message names it.

    """
    return {
        stem: schema.decode(cls, {"name": stem, **content}, f"{folder}/{stem}.yaml")
        for stem, content in scan_yaml(package, folder)
    }
