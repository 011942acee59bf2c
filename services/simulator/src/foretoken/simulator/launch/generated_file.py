"""Generated files as text: scenarios, Kubernetes objects, and the folder they are written to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.name import path_inside
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.simulator.launch.manifests import Manifest


def render_scenario(scenario: ServingScenario | TrainingScenario) -> str:
    """Return a scenario as YAML that `foretoken simulate` reads, without its defaults."""
    # A file's own name would stand for a name that is not written.
    content = {"name": scenario.name, **_changed(scenario)}
    return yaml.safe_dump(content, sort_keys=False, width=100)


def write_files(folder: Path, files: Mapping[str, str]) -> tuple[Path, ...]:
    """Write texts by their names into a folder, made where it is not there; return their paths.

    Raises:
        InvalidRequestError: they cannot be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = tuple(path_inside(folder, name, "folder") for name in files)
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise InvalidRequestError.of_field("folder", f"{folder}: {err.strerror}") from err
    return paths


def dump_manifests(manifests: Sequence[Manifest]) -> str:
    """Return Kubernetes objects as YAML."""
    # Through JSON, so that what appears twice is written twice and not referred to.
    plain = json.loads(json.dumps(manifests))
    return str(yaml.dump_all(plain, Dumper=_ReadableDumper, sort_keys=False, width=100))


class _ReadableDumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, not as one quoted line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a text, as a block where it has several lines."""
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_ReadableDumper.add_representer(str, _ReadableDumper.represent_str)


def _is_preset(model: ModelArchitecture) -> bool:
    try:
        return find_model(model.name) == model
    except UnknownModelError:
        return False


def _changed(value: Any) -> Any:
    """Return plain data, of dataclasses only what differs from its default."""
    if isinstance(value, ModelArchitecture) and _is_preset(value):
        return value.name
    if isinstance(value, tuple):
        return [_changed(item) for item in value]
    if not is_dataclass(value):
        return schema.encode(value)
    return {
        item.name: _changed(getattr(value, item.name))
        for item in fields(value)
        if getattr(value, item.name) != _default_of(item)
    }


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()
