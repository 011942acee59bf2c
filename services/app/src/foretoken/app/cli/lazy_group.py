"""A group of commands that imports a command's module when that command is run.

Reading a command's options takes its module, and what that imports: numeric libraries, gRPC. A list
of commands, by `--help` or in a shell's completion, needs the first lines of their help alone;
those stand next to the names.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

# How the text of help is written.
MARKUP: Final = "markdown"
# The option of a page. Its further names are read, and not in the help.
PAGE: Final = "--page"


@dataclass(frozen=True, slots=True)
class ListedCommand:
    """A command by its name and where it is.

    `place` is `module:object`, the module one of this package, the object a function or a
    `typer.Typer`; `summary` is the first paragraph of the command's help; `panel` the heading under
    which a list has it.
    """

    name: str
    place: str
    summary: str
    panel: str | None = None

    def load(self) -> Any:
        """Import the command and return it, a click command."""
        module, _, target = self.place.partition(":")
        found = getattr(import_module(f".{module}", __package__), target)
        holder = typer.Typer(rich_markup_mode=MARKUP)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name)
        else:
            holder.command(self.name)(found)
        command = typer.main.get_group(holder).commands[self.name]
        _hide_aliases(command)
        return command


def _hide_aliases(command: Any) -> None:
    for child in getattr(command, "commands", {}).values():
        _hide_aliases(child)
    for option in [item for item in command.params if PAGE in item.opts]:
        # An option of the same name takes the same value.
        hidden = copy(option)
        hidden.opts = [name for name in option.opts if name != PAGE]
        hidden.hidden, hidden.expose_value = True, False
        option.opts = [PAGE]
        if hidden.opts:
            command.params.append(hidden)


class LazyGroup(TyperGroup):
    """Lists `listed` after the commands of its own. A subclass says which those are."""

    listed: ClassVar[Sequence[ListedCommand]] = ()

    def __init__(self, **settings: Any) -> None:
        """Stand a command without options in for each that is listed."""
        super().__init__(**settings)
        self._places = {command.name: command for command in self.listed}
        for command in self.listed:
            self.commands[command.name] = TyperCommand(
                command.name,
                help=command.summary,
                rich_help_panel=command.panel,
                rich_markup_mode=MARKUP,
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the words after it; all that runs one comes here."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in self._places:
            command = self.commands[name] = self._places.pop(name).load()
        return name, command, rest
