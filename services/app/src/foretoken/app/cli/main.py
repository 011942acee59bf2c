"""The root command: global options, and the commands under it."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli import (
    calibrate,
    catalog,
    collect,
    compare,
    demo,
    generate,
    lists,
    memory,
    models,
    plan,
    predict,
    profile,
    results,
    search,
    serve,
    simulate,
    train,
    validate,
)
from foretoken.app.cli.state import CliState, fail, note, parse_assignments
from foretoken.app.config import load_config, process_environment
from foretoken.app.log_output import configure_logging
from foretoken.domain.errors import ForetokenError

# 128 and the number of SIGINT.
_INTERRUPTED = 130

app = typer.Typer(
    name="foretoken",
    help=(
        "What an LLM deployment will cost in time, memory and money, before anyone rents the GPUs."
        "\n\nA first tour: `foretoken demo`. Step by step: `catalog import` or `profile`, then"
        " `train`, `predict`, `simulate`."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(catalog.app, name="catalog")
app.add_typer(profile.app, name="profile")
app.command("train")(train.train)
app.add_typer(models.app, name="models")
app.command("predict")(predict.predict)
app.command("plan")(plan.plan)
app.command("memory")(memory.memory)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(simulate.app, name="simulate")
app.add_typer(search.app, name="search")
app.add_typer(generate.app, name="generate")
app.add_typer(validate.app, name="validate")
app.command("collect")(collect.collect)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.add_typer(results.app, name="results")
app.command("compare")(compare.compare)
app.add_typer(lists.app, name="list")
lists.app.command("corrections")(calibrate.list_corrections)


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
    output: Annotated[
        str, typer.Option(help="How results are printed: `table` or `json`.")
    ] = "table",
    log_level: Annotated[str | None, typer.Option(help="Log level, on stderr.")] = None,
) -> None:
    """Set up what every command shares."""
    if output not in ("table", "json"):
        raise typer.BadParameter("--output is `table` or `json`")
    overrides: dict[str, object] = {"home": home, "log.level": log_level}
    for service, address in parse_assignments(endpoint or []).items():
        overrides[f"endpoints.{service}"] = address
    try:
        resolved = load_config(config, process_environment(), overrides)
    except ForetokenError as err:
        fail(err)
        return
    is_serving = context.invoked_subcommand == "serve"
    configure_logging(resolved.log, quiet=not is_serving and log_level is None)
    context.obj = CliState(config=resolved, output=output)


def main() -> None:
    """Run the program; Ctrl-C says so and leaves with the status shells expect."""
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            note("interrupted")
        raise
