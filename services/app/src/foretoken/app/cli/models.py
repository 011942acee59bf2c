"""`foretoken models`: the versions of the latency models, and which of them answers."""

from collections.abc import Sequence
from typing import Annotated

import typer

from foretoken.app.cli.state import CliState, open_composition, state_of
from foretoken.domain.ports import ModelVersion

app = typer.Typer(
    help="Versions of the latency models, and which of them answers.", no_args_is_help=True
)


@app.command("list")
def list_models(context: typer.Context) -> None:
    """List the stored versions, newest first."""
    state = state_of(context)
    with open_composition(state) as services:
        _print_models(state, services.predictor.list_models())


@app.command()
def use(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="The version, or its beginning.")],
) -> None:
    """Make a version the one that answers; the others stay for whoever names them."""
    state = state_of(context)
    with open_composition(state) as services:
        _print_models(state, [services.predictor.activate_model(version)])


def _print_models(state: CliState, models: Sequence[ModelVersion]) -> None:
    rows = [
        (
            model.version,
            "yes" if model.is_active else "-",
            model.created_at,
            model.num_rows,
            model.snapshot_hash,
        )
        for model in models
    ]
    state.print_rows("Latency models", ("version", "active", "created", "points", "snapshot"), rows)
