"""The commands and where they are: a group whose modules are imported when they run.

Reading a command's options takes its module, and what that imports: numeric libraries, gRPC. A list
of commands, by `--help` or in a shell's completion, needs the first lines of their help alone;
those stand next to the names.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from foretoken.domain.errors import InvalidRequestError

# Click's, which new releases of typer have inside.
_USAGE_ERROR: Final[Any] = typer.BadParameter.__base__
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


_BEGIN = "Begin"
_MEASURE = "Measure"
_PREDICT = "Learn and predict"
_SIMULATE = "Simulate and search"
_RESULTS = "Results"
_SERVE = "Serve"


class RootGroup(LazyGroup):
    """`foretoken`: its commands come from modules that are imported when they run."""

    listed = (
        ListedCommand(
            "demo",
            "demo:demo",
            "Ask about GPUs first, then show that measuring works: profile this CPU and simulate"
            " on it.",
            _BEGIN,
        ),
        ListedCommand("list", "lists:app", "List the names that can be used.", _BEGIN),
        ListedCommand(
            "model",
            "model:model",
            "Show a model: layers by kind, parameters, bytes as stored, and what a request keeps.",
            _BEGIN,
        ),
        ListedCommand(
            "catalog",
            "catalog:app",
            "Bring measurements in and out, and see what is there.",
            _MEASURE,
        ),
        ListedCommand(
            "profile", "profile:app", "Time operators and stream them into the catalog.", _MEASURE
        ),
        ListedCommand(
            "plan",
            "predictor:plan",
            "Rank points to profile by the error that measuring them removes for the GPU time it"
            " takes.",
            _MEASURE,
        ),
        ListedCommand(
            "collect",
            "collect:collect",
            "Replay a workload against an OpenAI-compatible server, and record every token's time.",
            _MEASURE,
        ),
        ListedCommand(
            "train",
            "predictor:train",
            "Train latency models on all measurements in the catalog and make them the active"
            " ones.",
            _PREDICT,
        ),
        ListedCommand(
            "models",
            "predictor:models",
            "Versions of the latency models, and which of them answers.",
            _PREDICT,
        ),
        ListedCommand(
            "predict",
            "predictor:predict",
            "Estimate how long one operator takes, with a 90 % interval and what it rests on.",
            _PREDICT,
        ),
        ListedCommand(
            "calibrate",
            "calibrate:app",
            "Correct estimates by what was observed end to end.",
            _PREDICT,
        ),
        ListedCommand(
            "simulate",
            "command_table:simulate",
            "Evaluate a serving deployment, a training step or a whole run.",
            _SIMULATE,
        ),
        ListedCommand(
            "search",
            "command_table:search",
            "Find the best deployment or training run of many, or the highest rate of one.",
            _SIMULATE,
        ),
        ListedCommand(
            "memory",
            "memory:memory",
            "Tell what every pipeline stage of a training strategy holds, and whether it fits.",
            _SIMULATE,
        ),
        ListedCommand(
            "generate",
            "generate:app",
            "Write files that start what a scenario describes. Nothing is simulated.",
            _SIMULATE,
        ),
        ListedCommand(
            "validate",
            "validate:app",
            "Compare a simulation with what was measured.",
            _SIMULATE,
        ),
        ListedCommand(
            "results",
            "results:app",
            "What the catalog keeps of simulations and searches: list, show, export, delete.",
            _RESULTS,
        ),
        ListedCommand(
            "compare",
            "results:compare",
            "Set results of one kind side by side: figures with their ratios, and what was asked.",
            _RESULTS,
        ),
        ListedCommand(
            "serve",
            "serve:serve",
            "Serve over gRPC with health, reflection and Prometheus metrics, until SIGTERM or"
            " Ctrl-C.",
            _SERVE,
        ),
        ListedCommand(
            "ui",
            "serve:ui",
            "Ask, look, compare and share in the browser: every service in one process, and its"
            " pages.",
            _SERVE,
        ),
    )

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error of ours ends it with its message and status 1, wherever it is.

        So does a package that is not installed, as in an image with the command line alone. Wrong
        usage ends it with status 2.
        """
        from foretoken.app.cli.state import fail, fail_as_data
        from foretoken.domain.errors import ForetokenError, InvalidRequestError

        try:
            return super().invoke(ctx)
        except ForetokenError as err:
            fail(err)
        except _USAGE_ERROR as err:
            self._say_where_it_stands(err)
            fail_as_data(_invalid_request(err), err.exit_code)
            raise
        except ModuleNotFoundError as err:
            package = (err.name or "").partition(".")[0]
            if package in ("", "foretoken"):
                raise
            fail(
                InvalidRequestError(
                    f"{package} is not installed here, which services in this process need: say"
                    " where they are (--endpoint catalog=HOST:PORT), or install it"
                )
            )

    def _say_where_it_stands(self, error: Any) -> None:
        """Say of an option of all commands that it stands before the command."""
        name = getattr(error, "option_name", "")
        if hasattr(error, "possibilities") and any(name in item.opts for item in self.params):
            words = error.ctx.command_path.partition(" ")[2]
            error.message = f"{name} stands before the command: foretoken {name} ... {words}"
            error.possibilities = []


def _invalid_request(error: Any) -> "InvalidRequestError":
    """Return wrong usage as the error of a service, which names the option."""
    from foretoken.domain.errors import InvalidRequestError

    names = getattr(getattr(error, "param", None), "opts", ())
    if names:
        return InvalidRequestError.of_field(names[0], error.message)
    return InvalidRequestError(error.format_message())


class _Searches(LazyGroup):
    listed = (
        ListedCommand(
            "serving",
            "search_serving:serving",
            "Find the best deployments of a model: devices, layouts, batches, modes, formats.",
        ),
        ListedCommand(
            "capacity",
            "search_capacity:capacity",
            "Find the highest request rate at which a deployment meets all its targets.",
        ),
        ListedCommand(
            "training",
            "search_training:training",
            "Find the best way to train a model on a cluster: every strategy counted.",
        ),
        ListedCommand(
            "internevo",
            "search_internevo:internevo",
            "Answer what InternEvo's simulator is asked, with its points and in its terms.",
        ),
    )


search = typer.Typer(
    cls=_Searches,
    help="Find the best deployment or training run of many, or the highest rate of one.",
    no_args_is_help=True,
)


class _Simulations(LazyGroup):
    listed = (
        ListedCommand(
            "serving",
            "simulate:serving",
            "Simulate an inference deployment request by request.",
        ),
        ListedCommand(
            "training",
            "simulate:training",
            "Simulate one optimizer step: its time and where it goes, its memory, how far to trust"
            " it.",
        ),
        ListedCommand(
            "run",
            "simulate_run:run",
            "Plan a whole training run: days, money and energy, with failures and checkpoints.",
        ),
    )


simulate = typer.Typer(
    cls=_Simulations,
    help="Evaluate a serving deployment, a training step or a whole run.",
    no_args_is_help=True,
)
