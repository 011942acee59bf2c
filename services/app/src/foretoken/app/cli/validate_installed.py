"""`foretoken validate serving --against installed`: this home against runs that others measured."""

from dataclasses import dataclass

import typer

from foretoken.app.cli.state import (
    CliState,
    build_table,
    format_ratio,
    leave_unless,
    open_composition,
    show_progress,
    stack,
)
from foretoken.app.installed_runs import list_installed_runs
from foretoken.domain.alias import canonical_device, canonical_model
from foretoken.domain.requests.option import option
from foretoken.simulator.validation.published_comparison import (
    PublishedOutcome,
    PublishedScore,
    compare_published,
    draw_runs,
    score_published,
)

_INSTALLED, _GROUP = "installed", "Against what others measured"


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """Which runs that others measured a home is compared with."""

    against: str = option(
        "",
        "`installed`: simulate the runs that `catalog install nvidia` brought, or the starter, in"
        " place of one of your own; the errors are printed by model, engine and device.",
        choices=("", _INSTALLED),
        group=_GROUP,
    )
    model: str = option("", "Only runs of this model.", group=_GROUP)
    device: str = option("", "Only runs on this device.", group=_GROUP)
    runs: int = option(
        12, "Most runs of a model under an engine on a device.", minimum=1, group=_GROUP
    )


def validate_installed(state: CliState, asked: PublishedOptions) -> None:
    """Simulate a sample of the runs that are asked for, and print the errors."""
    model, device = canonical_model(asked.model), canonical_device(asked.device)
    with open_composition(state) as services:
        runs = [
            run
            for run in list_installed_runs(services.catalog, state.config.starter)
            if model in ("", run.model) and device in ("", run.device)
        ]
        if not runs:
            raise typer.BadParameter(
                "no measured runs of that kind are here: `foretoken catalog install nvidia`"
            )
        drawn = draw_runs(runs, asked.runs)
        foretoken = services.foretoken("simulator")
        outcomes: list[PublishedOutcome] = []
        with show_progress(f"simulate {len(drawn)} of {len(runs)} measured runs") as update:
            for outcome in compare_published(drawn, foretoken.simulate_serving):
                outcomes.append(outcome)
                update.set(len(outcomes) / len(drawn), outcome.run.model)
    scores = score_published(outcomes)
    rows = [_row(score) for score in scores]
    columns = ("model", "engine", "device", "runs", "TPOT error", "bias", "TTFT error", "bias")
    reasons = dict.fromkeys(
        f"{score.num_left_out} runs of {score.model} under {score.engine}: {score.reason}"
        for score in scores
        if score.reason
    )
    title = "Simulated against measured: mean errors without signs, and with them"
    state.print_object(scores, lambda: stack(build_table(title, columns, rows), *reasons))
    leave_unless(any(score.num_runs for score in scores))


def _row(score: PublishedScore) -> tuple[object, ...]:
    errors = (
        score.tpot_mape_ratio,
        score.tpot_bias_ratio,
        score.ttft_mape_ratio,
        score.ttft_bias_ratio,
    )
    shown = [format_ratio(error, score.num_runs) for error in errors]
    return score.model, score.engine, score.device, score.num_runs, *shown
