"""`foretoken search`: the best deployment or training run of many, the highest rate of one."""

import typer

from foretoken.app.cli.search_capacity import capacity
from foretoken.app.cli.search_internevo import internevo
from foretoken.app.cli.search_serving import serving
from foretoken.app.cli.search_training import training

app = typer.Typer(
    help="Find the best deployment or training run of many, or the highest rate of one.",
    no_args_is_help=True,
)
app.command()(serving)
app.command()(capacity)
app.command()(training)
app.command()(internevo)
