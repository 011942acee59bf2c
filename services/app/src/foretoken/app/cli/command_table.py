"""The commands under `foretoken` and its groups, in the order of its help."""

import typer

from foretoken.app.cli.lazy_group import LazyGroup, ListedCommand

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
            "Run everything once: four services, a CPU profile, models, serving and training.",
            _BEGIN,
        ),
        ListedCommand("list", "lists:app", "List the names that can be used.", _BEGIN),
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
    )


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
