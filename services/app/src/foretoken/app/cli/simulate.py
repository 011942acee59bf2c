"""`foretoken simulate`: evaluate a serving deployment, a training step or a whole run."""

import typer

from foretoken.app.cli.lazy_group import LazyGroup, ListedCommand


class _Simulations(LazyGroup):
    listed = (
        ListedCommand(
            "serving",
            "simulate_serving:serving",
            "Simulate an inference deployment request by request.",
        ),
        ListedCommand(
            "training",
            "simulate_training:training",
            "Simulate one optimizer step: its time and where it goes, its memory, how far to trust"
            " it.",
        ),
        ListedCommand(
            "run",
            "simulate_run:run",
            "Plan a whole training run: days, money and energy, with failures and checkpoints.",
        ),
    )


app = typer.Typer(
    cls=_Simulations,
    help="Evaluate a serving deployment, a training step or a whole run.",
    no_args_is_help=True,
)
