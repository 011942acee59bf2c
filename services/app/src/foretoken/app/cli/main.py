"""The root command: global options, and the commands under it.

What sets a command up is imported where that is done: help and a shell's completion need none of
it, and should come at once.
"""

from pathlib import Path
from typing import Annotated

import typer

import foretoken
from foretoken.app.cli.command_table import MARKUP, RootGroup
from foretoken.jobs.process_setup import (
    collect_rarely,
    return_memory,
    take_as_ours,
    use_one_thread,
)

# What `--help` says of all commands.
_STATUS_HELP = (
    "Exit status: 0 the answer is there; 1 an error, with its reason; 2 wrong usage; 3 a valid"
    " question whose answer is that nothing does it: what was asked does not fit, or no candidate"
    " meets the targets. The answer is printed all the same."
)
# 128 and the number of SIGINT.
_INTERRUPTED = 130

app = typer.Typer(
    name="foretoken",
    cls=RootGroup,
    help=(
        "What an LLM deployment will cost in time, memory and money, before anyone rents the GPUs."
        "\n\nA first tour: `foretoken demo`. Step by step: `catalog import` or `profile`, then"
        " `train`, `predict`, `simulate`."
    ),
    epilog=_STATUS_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"foretoken {foretoken.__version__}")
        raise typer.Exit


def _leave_starter(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        context.meta["predictor.starter"] = ""


def _check_output(output: str) -> None:
    from foretoken.app.cli.data_output import OUTPUTS
    from foretoken.app.cli.state import choose_output

    if output not in OUTPUTS:
        raise typer.BadParameter("--output is `table`, `json` or `csv`")
    choose_output(output)


_OUTPUT = typer.Option(help="How results are printed: `table`, `json` or `csv`.")


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file (YAML).", envvar="FORETOKEN_CONFIG")
    ] = None,
    home: Annotated[
        str | None, typer.Option(help="Folder of the embedded services' files.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Where a service is: `catalog=dns:///host:50051`, or `catalog=embedded`."
            " Repeatable; services not named run inside this process."
        ),
    ] = None,
    output: Annotated[str, _OUTPUT] = "table",
    log_level: Annotated[str | None, typer.Option(help="Log level, on stderr.")] = None,
    _no_starter: Annotated[
        bool,
        typer.Option(
            "--no-starter",
            help="Answer without the measurements of the starter catalog.",
            callback=_leave_starter,
        ),
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Set up what every command shares."""
    from foretoken.app.cli.state import CliState, parse_assignments
    from foretoken.app.config import load_config, process_environment
    from foretoken.app.starter import with_starter
    from foretoken.app.telemetry.commands import observe_command

    take_as_ours()
    # What is profiled on the CPU has the threads that it has without us.
    if context.invoked_subcommand != "profile":
        use_one_thread()
        return_memory()
    if context.invoked_subcommand != "serve":
        collect_rarely()
    _check_output(output)
    overrides: dict[str, object] = {"home": home, "log.level": log_level, **context.meta}
    for service, address in parse_assignments(endpoint or []).items():
        overrides[f"endpoints.{service}"] = address
    environment = process_environment()
    resolved = with_starter(load_config(config, environment, overrides), environment)
    name, is_quiet = context.invoked_subcommand or "", log_level is None
    context.call_on_close(observe_command(resolved, name, is_quiet=is_quiet))
    context.obj = CliState(config=resolved, output=output)


def main() -> None:
    """Run the program; Ctrl-C says so and leaves with the status shells expect."""
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            from foretoken.app.cli.state import note

            note("interrupted")
        raise
