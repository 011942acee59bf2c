"""Commands that are listed without being imported are the commands that run."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import foretoken
from foretoken.app.cli.command_table import LazyGroup, ListedCommand, RootGroup
from foretoken.app.cli.main import app


def _listed(group: LazyGroup, path: str) -> Iterator[tuple[str, ListedCommand, Any]]:
    """Yield where every listed command is, its entry, and the command itself."""
    for entry in group.listed:
        command = entry.load()
        yield f"{path} {entry.name}", entry, command
        if isinstance(command, LazyGroup):
            yield from _listed(command, f"{path} {entry.name}")


def _root() -> Any:
    return typer.main.get_group(app)


_COMMANDS = list(_listed(_root(), "foretoken"))


def test_groups_within_groups_are_listed_too() -> None:
    places = {place for place, _, _ in _COMMANDS}
    assert {
        "foretoken memory",
        "foretoken search training",
        "foretoken simulate run",
        "foretoken list corrections",
    } <= places


@pytest.mark.parametrize(
    ("entry", "command"),
    [(entry, command) for _, entry, command in _COMMANDS],
    ids=[place for place, _, _ in _COMMANDS],
)
def test_a_summary_is_the_first_paragraph_of_the_help(entry: ListedCommand, command: Any) -> None:
    first, _, _ = command.help.partition("\n\n")
    assert " ".join(first.split()) == entry.summary
    assert command.name == entry.name


def test_a_list_has_every_command_once_and_in_order() -> None:
    assert list(_root().commands) == [entry.name for entry in RootGroup.listed]
    assert len(set(_root().commands)) == len(RootGroup.listed)


def test_the_list_of_a_group_tells_every_summary() -> None:
    outcome = CliRunner().invoke(app, ["search", "--help"], env={"COLUMNS": "200"})
    searches = [entry for place, entry, _ in _COMMANDS if place.startswith("foretoken search ")]
    assert 0 == outcome.exit_code
    assert [] == [entry.name for entry in searches if entry.summary not in outcome.output]
    assert ["serving", "capacity", "training", "internevo"] == [entry.name for entry in searches]


@pytest.mark.parametrize(
    ("words", "near"), [(("memry",), "memory"), (("search", "trainin"), "training")]
)
def test_an_unknown_command_is_told_with_its_nearest(words: tuple[str, ...], near: str) -> None:
    outcome = CliRunner().invoke(app, words)
    assert 2 == outcome.exit_code
    assert f"No such command '{words[-1]}'. Did you mean '{near}'?" in outcome.output


def test_a_command_is_the_same_object_once_it_ran() -> None:
    group = _root()
    context = typer.Context(group)
    name, first, rest = group.resolve_command(context, ["search", "training", "--help"])
    assert ("search", ["training", "--help"]) == (name, rest)
    assert first is group.resolve_command(context, ["search"])[1]
    assert first is group.commands["search"]


def test_the_module_runs_as_the_program_does() -> None:
    command = [sys.executable, "-m", "foretoken.app", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"foretoken {foretoken.__version__}\n" == done.stdout
