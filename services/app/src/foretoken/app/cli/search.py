"""`foretoken search`: the best deployment or training run of many, the highest rate of one."""

import typer

from foretoken.app.cli.lazy_group import LazyGroup, ListedCommand


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


app = typer.Typer(
    cls=_Searches,
    help="Find the best deployment or training run of many, or the highest rate of one.",
    no_args_is_help=True,
)
