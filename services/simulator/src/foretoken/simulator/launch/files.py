"""Generated files as text: from templates, scenarios as YAML, tables as TOML; and their folder."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.name import path_inside
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario

if TYPE_CHECKING:
    from jinja2 import Environment

# The label that all objects of a deployment have.
PART = "app.kubernetes.io/part-of=foretoken-deployment"


def render(template: str, said: Mapping[str, object], blocks: str = "") -> str:
    """Return the text of a template in `templates/`, with some of its blocks filled in."""
    extended = f'{{% extends "{template}.j2" %}}{blocks}'
    return _templates().from_string(extended).render(part=PART, **said)


def render_manifests(template: str, said: Mapping[str, object]) -> str:
    """Return the Kubernetes objects of a template as YAML, laid out alike whatever they hold."""
    # Through JSON, so that what appears twice is written twice and not referred to.
    plain = json.loads(json.dumps([*yaml.safe_load_all(render(template, said))]))
    return str(yaml.dump_all(plain, Dumper=_ReadableDumper, sort_keys=False, width=100))


def render_scenario(scenario: ServingScenario | TrainingScenario) -> str:
    """Return a scenario as YAML that `foretoken simulate` reads, without its defaults."""
    # A file's own name would stand for a name that is not written.
    content = {"name": scenario.name, **_changed(scenario)}
    return yaml.safe_dump(content, sort_keys=False, width=100)


def render_toml(content: Mapping[str, object]) -> str:
    """Return tables of numbers, texts, booleans and lists of them as TOML.

    The standard library reads the format, and writes none.
    """
    return "\n".join(_toml_lines(content, ())).strip("\n") + "\n"


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


@cache
def _templates() -> "Environment":
    # The command line imports this module in processes that write nothing.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - shell and YAML; values are quoted where they are put in
        loader=PackageLoader("foretoken.simulator.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["product"] = _product
    return environment


def _product(device: str) -> str:
    """Return the label of nodes with a device, as NVIDIA's feature discovery has it."""
    return find_device(device).vendor_names[0].replace(" ", "-")


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


def _toml_lines(content: Mapping[str, object], path: tuple[str, ...]) -> Iterator[str]:
    values = {name: value for name, value in content.items() if not isinstance(value, Mapping)}
    if path and values:
        yield ""
        yield f"[{'.'.join(path)}]"
    for name, value in values.items():
        yield f"{name} = {_toml_value(value)}"
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, name))


def _toml_value(value: object) -> str:
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value):
        return "[\n" + "".join(f"  {_toml_value(item)},\n" for item in value) + "]"
    # A text, a number, a boolean and a list of them are written alike in JSON and TOML.
    return json.dumps(value)
