"""Scenario files: YAML that names a model, a device and a workload, and their keys.

Few scenarios name further files. What reads those, with numeric libraries, is imported where one is
named.

`python -m foretoken.app.scenario_file PAGE` writes them into a page.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.load import load_model
from foretoken.domain.plugins import read_yaml
from foretoken.domain.requests.option import Option, options_of
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.text_file import find_named_file, is_there

if TYPE_CHECKING:
    from foretoken.domain.requests.search import ServingSearchRequest
    from foretoken.domain.requests.training_search import TrainingSearchRequest


T = TypeVar("T", ServingScenario, TrainingScenario)
S = TypeVar("S", "ServingSearchRequest", "TrainingSearchRequest")
# What makes a scenario of a file's content, of changes to it, and of its path.
BuildScenario = Callable[[dict[str, Any], Mapping[str, Any], Path], object]


def read_serving_scenario(path: Path, overrides: Mapping[str, Any]) -> ServingScenario:
    """Return the serving scenario in a file, its trace loaded so that it is complete anywhere.

    A relative `trace_path` or `model` path is relative to the file. `overrides` are flags by
    dotted path.

    Raises:
        InvalidRequestError: an unknown key, a wrong value or a bad trace line, with its place.

    """
    return build_serving_scenario(read_yaml(path, "scenario"), overrides, path)


def build_serving_scenario(
    content: dict[str, Any], overrides: Mapping[str, Any], path: Path
) -> ServingScenario:
    """Return the scenario of a file's content; see `read_serving_scenario`.

    `path` need not exist: it names the scenario, and paths are relative to its folder.
    """
    scenario = _build(ServingScenario, content, overrides, path)
    workload = scenario.workload
    if workload.arrival == "trace" and workload.trace_path and not workload.trace_requests:
        from foretoken.simulator.workload.trace import load_trace

        trace_path = path.parent / Path(workload.trace_path).expanduser()
        trace = load_trace(trace_path, workload.trace_format, workload.hash_block_tokens)
        workload = replace(
            workload, trace_requests=trace.requests, hash_block_tokens=trace.hash_block_tokens
        )
    return replace(scenario, workload=workload)


def read_training_scenario(path: Path, overrides: Mapping[str, Any]) -> TrainingScenario:
    """Return the training scenario in a file; see `read_serving_scenario`.

    `module_times` and `calibration` may name files, relative to this one.
    """
    return build_training_scenario(read_yaml(path, "scenario"), overrides, path)


def build_training_scenario(
    content: dict[str, Any], overrides: Mapping[str, Any], path: Path
) -> TrainingScenario:
    """Return the scenario of a file's content; see `read_training_scenario`.

    `path` need not exist: it names the scenario, and paths are relative to its folder.
    """
    return _build(TrainingScenario, content, overrides, path)


def read_search_request(path: Path, cls: type[S], build: BuildScenario) -> S:
    """Return the whole search in a file, whose scenario may name files relative to it.

    Raises:
        InvalidRequestError: no scenario, an unknown key or a wrong value, with its place.

    """
    content = read_yaml(path, "search")
    scenario = content.get("scenario")
    if not isinstance(scenario, dict):
        raise InvalidRequestError.of_field("--request", f"{path} has no section `scenario`")
    return schema.decode(cls, {**content, "scenario": schema.encode(build(scenario, {}, path))})


def read_searched_scenario(path: Path | None) -> dict[str, Any]:
    """Return the content of the file that a search starts from, empty without one.

    Raises:
        InvalidRequestError: it cannot be read, or is a whole search.

    """
    content = read_yaml(path, "scenario") if path is not None else {}
    if "scenario" in content:
        raise InvalidRequestError.of_field(
            "scenario", f"{path} is a whole request: give it as --request {path}"
        )
    return content


def _build(cls: type[T], content: dict[str, Any], overrides: Mapping[str, Any], path: Path) -> T:
    for dotted, value in overrides.items():
        schema.set_key(content, dotted, value)
    content.setdefault("name", path.stem)
    _write_as_text(content.get("engine"), "rules")
    _write_as_text(content.get("workload"), "arrival_options")
    _write_as_text(content.get("trainer"), "rules")
    if cls is TrainingScenario:
        _load_training_files(content, path.parent)
    _load_model(content, "model", path.parent)
    _load_model(content.get("speculative"), "draft_model", path.parent)
    return schema.decode(cls, content)


def _load_training_files(content: dict[str, Any], folder: Path) -> None:
    """Replace what a training scenario names by a path: `module_times`, `calibration`.

    `module_times` is a path, or a mapping with the path as `file` and with what the file does not
    say of itself (`sequence_length`, `dtype`, `device`). Relative paths are relative to `folder`;
    an empty one names no file.
    """
    for name in ("module_times", "calibration"):
        if content.get(name) == "":
            content[name] = None
    profile = content.get("module_times")
    if isinstance(profile, str):
        profile = {"file": profile}
    if isinstance(profile, Mapping) and isinstance(profile.get("file"), str):
        from foretoken.app.module_times_file import read_module_times

        facts = {name: value for name, value in profile.items() if name != "file"}
        path = find_named_file(folder, profile["file"], "module_times.file")
        content["module_times"] = read_module_times(path, facts)
    calibration = content.get("calibration")
    if isinstance(calibration, str):
        content["calibration"] = read_yaml(
            find_named_file(folder, calibration, "calibration"), "calibration"
        )


def _load_model(section: Any, key: str, folder: Path) -> None:
    """Let a file name a model, or the file of one next to it."""
    name = section.get(key) if isinstance(section, dict) else None
    if isinstance(name, str):
        in_folder = folder / name
        section[key] = load_model(str(in_folder) if is_there(in_folder) else name)


def _write_as_text(section: Any, key: str) -> None:
    """Let a file say `has_prefix_caching: false`: these options travel as YAML text."""
    if isinstance(section, dict) and isinstance(section.get(key), Mapping):
        section[key] = {
            name: value if isinstance(value, str) else _to_text(value, f"{key}.{name}")
            for name, value in section[key].items()
        }


def _to_text(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as err:
        raise InvalidRequestError.of_field(field, f"is no plain value: {err}") from err


# The blocks of the page by what its fence says.
BLOCKS = {"serving-scenario": ServingScenario, "training-scenario": TrainingScenario}


def render_keys(cls: type, indent: str = "") -> Iterator[str]:
    """Yield the described fields of a dataclass as lines of YAML, its sections after their key."""
    described = options_of(cls)
    for item in fields(cls):
        said = described.get(item.name)
        if said is None:
            continue
        hint: Any = schema.field_types(cls)[item.name]
        is_section = is_dataclass(hint) and bool(options_of(cast("type", hint)))
        if is_section and said.example is None:
            yield f"{indent}{item.name}:  # {said.text}"
            yield from render_keys(hint, f"{indent}  ")
        else:
            yield f"{indent}{item.name}: {_value(item, said)}  # {said.text}"


def render_page(text: str) -> str:
    """Return the page with its blocks made anew."""
    for name, cls in BLOCKS.items():
        fence = f"```yaml {name}\n"
        before, _, rest = text.partition(fence)
        _, _, after = rest.partition("```")
        text = "".join([before, fence, *(f"{line}\n" for line in render_keys(cls)), "```", after])
    return text


def _value(item: Field[Any], said: Option) -> str:
    value = said.example
    if value is None:
        value = item.default if item.default_factory is MISSING else item.default_factory()
    plain = schema.encode(value)
    dumped = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=1000)
    return dumped.removesuffix("...\n").strip() if plain != "" else '""'


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(render_page(page.read_text(encoding="utf-8")), encoding="utf-8")
