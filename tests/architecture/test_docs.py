"""What the documents show is true: commands parse, blocks run or decode, links lead somewhere.

The word after a block's language says more than "it parses":

- `bash run`, `python run`: the block is executed;
- `yaml config`, `yaml serving-scenario`, `yaml training-scenario`, `yaml device`, `yaml model`: the
  block is decoded as such a file;
- `yaml service-defaults`: keys of services' sections, compared with their defaults.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from foretoken.app.cli.main import app
from foretoken.app.compose import PROFILER_PLACES
from foretoken.app.config import AppConfig, load_config
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario, render_page
from foretoken.catalog.config import CatalogConfig
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain import schema
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.sourced import strip_sources
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.plugins import parse_yaml
from foretoken.predictor.config import PredictorConfig
from foretoken.profiler.cluster.spec import KubernetesSpec
from foretoken.profiler.config import ProfilerConfig
from foretoken.simulator.config import SimulatorConfig

_ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True, slots=True)
class _Block:
    """A fenced block; `check` is what stands after the language."""

    place: str
    language: str
    check: str
    text: str


def _documents() -> list[Path]:
    folders = ("docs", "clients/python", "services", "deploy", "proto")
    nested = (path for folder in folders for path in (_ROOT / folder).rglob("*.md"))
    return [
        *sorted(_ROOT.glob("*.md")),
        *sorted(p for p in nested if "node_modules" not in p.parts),
    ]


def _blocks(language: str, check: str | None = None) -> list[_Block]:
    return [
        block
        for path in _documents()
        for block in _blocks_of(path)
        if block.language == language and check in (None, block.check)
    ]


def _blocks_of(path: Path) -> Iterator[_Block]:
    text = path.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        place = f"{path.relative_to(_ROOT)}:{line}"
        yield _Block(place, match[1], match[2].strip(), match[3])


def _command_lines() -> list[tuple[str, list[str]]]:
    """Return (place, words) of every command in the bash blocks, continued lines joined."""
    return [
        (f"{block.place}: {line}", words)
        for block in _blocks("bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]


def test_the_documents_have_blocks_to_check() -> None:
    """A pattern that found nothing would let everything pass."""
    programs = {words[0] for _, words in _command_lines()}
    assert {"foretoken", "make", "kubectl", "docker", "source"} == programs


def test_every_foretoken_command_parses() -> None:
    root = typer.main.get_command(app)
    problems = [
        f"{place}: {problem}"
        for place, words in _command_lines()
        if words[0] == "foretoken" and (problem := _parse_problem(root, words[1:]))
    ]
    assert problems == []


def test_a_wrong_command_does_not_parse() -> None:
    root = typer.main.get_command(app)
    assert "No such command" in _parse_problem(root, ["simulate", "weather"])
    assert "No such option" in _parse_problem(root, ["train", "--gently"])
    assert "Missing" in _parse_problem(root, ["predict"])


def test_every_make_target_exists() -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = {word for _, words in _command_lines() if words[0] == "make" for word in words[1:2]}
    assert used - targets == set()
    assert used != set()


def test_every_example_file_in_a_command_exists() -> None:
    missing = [
        place
        for place, words in _command_lines()
        for word in words
        if word.startswith(("docs/", "deploy/", "services/")) and not (_ROOT / word).exists()
    ]
    assert missing == []


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{path.relative_to(_ROOT)}: {target}"
        for path in _documents()
        for target in _LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert broken == []


def test_configuration_blocks_are_accepted() -> None:
    blocks = _blocks("yaml", "config")
    configs = [load_config(None, {}, parse_yaml(block.text, block.place)) for block in blocks]
    assert configs != []


def test_the_configuration_reference_shows_every_key_with_its_default() -> None:
    """Sections that services define themselves are left to their `config.py`."""
    (block,) = (b for b in _blocks("yaml", "config") if "reference/configuration.md" in b.place)
    shown = dict(parse_yaml(block.text, block.place))
    client = schema.encode(ChannelOptions(address=""))
    del client["address"]
    assert schema.encode(AppConfig()) | {"client": client} == shown


def test_the_keys_of_services_are_shown_with_their_defaults() -> None:
    (block,) = _blocks("yaml", "service-defaults")
    services = parse_yaml(block.text, block.place)
    defaults = {
        "catalog": schema.encode(CatalogConfig(path="catalog.duckdb")),
        "predictor": schema.encode(PredictorConfig(state_folder="predictor")),
        "simulator": schema.encode(SimulatorConfig(state_folder="simulator")),
        "profiler": {
            **schema.encode(ProfilerConfig(state_folder="profiler")),
            "place": PROFILER_PLACES[0],
            "kubernetes": schema.encode(KubernetesSpec()),
        },
    }
    assert services == {
        service: {key: defaults[service].get(key) for key in section}
        for service, section in services.items()
    }


def test_the_keys_of_scenarios_are_those_of_their_fields() -> None:
    """When this fails, run `make docs`."""
    page = (_ROOT / "docs" / "reference" / "scenario-files.md").read_text(encoding="utf-8")
    assert render_page(page) == page


def test_serving_scenarios_are_accepted(tmp_path: Path) -> None:
    paths = _scenario_paths("serving-scenario", tmp_path, "serving.yaml")
    assert [1] * len(paths) == [read_serving_scenario(path, {}).layout.tp for path in paths]


def test_training_scenarios_are_accepted(tmp_path: Path) -> None:
    paths = _scenario_paths("training-scenario", tmp_path, "training.yaml")
    assert [8] * len(paths) == [
        read_training_scenario(path, {}).layout.num_devices for path in paths
    ]


def test_device_and_model_blocks_are_accepted() -> None:
    decoded: list[Any] = []
    for block in _blocks("yaml", "device"):
        content = strip_sources(parse_yaml(block.text, block.place), block.place)
        decoded.append(schema.decode(DeviceSpec, {"name": "example", **content}))
    for block in _blocks("yaml", "model"):
        content = parse_yaml(block.text, block.place)
        decoded.append(schema.decode(ModelArchitecture, {"name": "example", **content}))
    assert [DeviceSpec, ModelArchitecture, ModelArchitecture] == [type(item) for item in decoded]


def test_all_other_blocks_are_well_formed() -> None:
    for block in _blocks("yaml"):
        parse_yaml(block.text, block.place)
    for block in _blocks("python"):
        compile(block.text, block.place, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("block", _blocks("python", "run"), ids=lambda block: block.place)
def test_python_blocks_run(block: _Block, tmp_path: Path) -> None:
    _run([sys.executable, "-W", "error", "-c", block.text], block, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", _blocks("bash", "run"), ids=lambda block: block.place)
def test_bash_blocks_run(block: _Block, tmp_path: Path, find_tool: Callable[[str], str]) -> None:
    _run([find_tool("bash"), "-euo", "pipefail", "-c", block.text], block, tmp_path)


def _run(command: list[str], block: _Block, folder: Path) -> None:
    """Run a block as a user would, as in the repository, with the starter, its files kept apart."""
    work = folder / "work"
    work.mkdir()
    for entry in _ROOT.iterdir():
        (work / entry.name).symlink_to(entry)
    environment = {
        **{name: value for name, value in os.environ.items() if "STARTER" not in name},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FORETOKEN_HOME": str(folder / "home"),
    }
    ran = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{block.place}\n{ran.stdout}{ran.stderr}"


def _parse_problem(command: Any, words: list[str], parent: Any = None) -> str:
    """Parse words as the program would, subcommand by subcommand; return what is wrong, or ""."""
    try:
        context = command.make_context(words[0] if words else "", list(words), parent=parent)
        if not hasattr(command, "resolve_command"):
            return ""
        rest = [*context._protected_args, *context.args]
        if not rest and command.invoke_without_command:
            return ""
        _, child, child_words = command.resolve_command(context, rest)
    except Exception as err:  # noqa: BLE001 - which classes depends on the parser typer brings
        return f"{type(err).__name__}: {getattr(err, 'message', err)}"
    return _parse_problem(child, child_words, context)


def _scenario_paths(check: str, folder: Path, example: str) -> list[Path]:
    paths = [_ROOT / "docs" / "examples" / example]
    for index, block in enumerate(_blocks("yaml", check)):
        path = folder / f"{index}.yaml"
        path.write_text(block.text, encoding="utf-8")
        paths.append(path)
    assert len(paths) > 1
    return paths
