"""The commands under `foretoken`, in the order of its help."""

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
            "plan:plan",
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
            "train:train",
            "Train latency models on all measurements in the catalog and make them the active"
            " ones.",
            _PREDICT,
        ),
        ListedCommand(
            "models",
            "models:app",
            "Versions of the latency models, and which of them answers.",
            _PREDICT,
        ),
        ListedCommand(
            "predict",
            "predict:predict",
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
            "simulate:app",
            "Evaluate a serving deployment, a training step or a whole run.",
            _SIMULATE,
        ),
        ListedCommand(
            "search",
            "search:app",
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
            "compare:compare",
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
