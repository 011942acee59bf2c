"""`foretoken demo`: answers about GPUs first, then the main job on this machine's CPU."""

import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from foretoken.app.cli.output_file import page_option
from foretoken.app.cli.predictor import estimate_table
from foretoken.app.cli.search_text import report_table
from foretoken.app.cli.simulate import serving_table, training_table
from foretoken.app.cli.state import (
    CliState,
    item_table,
    note,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.app.config import SERVICES
from foretoken.app.demo import DemoOutcome, ServiceProcesses, run_demo
from foretoken.app.demo_questions import (
    DEPLOYMENT_TITLE,
    GEMM_DEVICE,
    STEP_TITLE,
    DemoAnswers,
    ask_questions,
)
from foretoken.app.installed_runs import list_installed_runs, show_nearest

# Layouts that are printed of the search.
_NUM_LAYOUTS = 3


def demo(
    context: typer.Context,
    report: Annotated[
        Path, page_option("--report", text="Where to write the page with pictures.")
    ] = Path("demo-report.html"),
    cpu_only: Annotated[
        bool, typer.Option("--cpu-only", help="Ask nothing about GPUs, go straight to this CPU.")
    ] = False,
) -> None:
    """Ask about GPUs first, then show that measuring works: profile this CPU and simulate on it.

    The questions are answered from the starter catalog, in half a minute. Then four services run as
    processes of their own on loopback with a temporary catalog; all are stopped at the end, also on
    Ctrl-C. That takes one to three minutes.
    """
    # Pages take long to load, which no other command should wait for.
    from foretoken.simulator.report.page import render_page, result_sections

    state = state_of(context)
    signal.signal(signal.SIGTERM, _stop)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foretoken-demo-") as folder:
        answers = None if cpu_only else _ask(state, Path(folder) / "asked")
        note("starting catalog, predictor, simulator and profiler on loopback")
        with (
            ServiceProcesses(Path(folder)) as processes,
            open_composition(state.with_config(processes.client_config)) as services,
        ):
            outcome = run_demo(services.foretoken(*SERVICES), show_progress)
        note("all services stopped")
    show_outcome(state, outcome)
    sections = [*result_sections(*outcome.serving), *result_sections(outcome.training_step)]
    if answers is not None:
        asked = [*result_sections(answers.deployments), *result_sections(answers.step)]
        sections = [*asked, *sections]
    page = render_page("Foretoken demo", sections)
    report.write_text(page, encoding="utf-8")
    note(f"page with pictures: {report.resolve().as_uri()}; ask questions of yours: foretoken ui")
    note(f"done in {time.monotonic() - started:.0f} s")


def show_outcome(state: CliState, outcome: DemoOutcome) -> None:
    """Print what this CPU was measured and predicted to take."""
    estimate = outcome.estimate
    note(
        f"one GEMM never profiled, 100 x 1408 x 512: {estimate.latency_us:.0f} µs,"
        f" between {estimate.low_us:.0f} and {estimate.high_us:.0f},"
        f" {estimate.provenance.name.lower()}"
    )
    if num_flagged := outcome.profile.num_flagged:
        note(
            f"{num_flagged} of {outcome.profile.num_measured} points were timed while other work"
            " disturbed this machine and are not trained on: a quiet one predicts better"
        )
    _show_accuracy(state, outcome)
    if not state.is_data:
        shown = outcome.serving[::2]
        state.print_object(
            shown,
            lambda: serving_table("Serving tiny-llama on this CPU", shown),
            *(r.echo for r in shown),
        )
        step = outcome.training_step
        state.print_object(
            step,
            lambda: training_table("Training tiny-llama on this CPU", step),
            step.echo,
        )


def _ask(state: CliState, home: Path) -> DemoAnswers:
    """Ask and print what no machine here can measure."""
    asking = state.with_config(replace(state.config, home=str(home)))
    started = time.monotonic()
    with open_composition(asking) as services:
        answers = ask_questions(services.foretoken("predictor", "simulator"), show_progress)
        runs = list_installed_runs(services.catalog, asking.config.starter)
    answers = replace(answers, deployments=show_nearest(answers.deployments, runs))
    if not state.is_data:
        state.print_object(
            answers.deployments,
            lambda: report_table(DEPLOYMENT_TITLE, answers.deployments, _NUM_LAYOUTS),
            answers.deployments.echo,
        )
        state.print_object(
            answers.step,
            lambda: training_table(STEP_TITLE, answers.step),
            answers.step.echo,
        )
        state.print_object(answers.gemm, lambda: estimate_table("gemm", GEMM_DEVICE, answers.gemm))
    note(f"three answers in {time.monotonic() - started:.0f} s; now the same on this machine")
    return answers


def _show_accuracy(state: CliState, outcome: DemoOutcome) -> None:
    """Print the errors on sizes held out of training; a busy machine times too few to hold any."""
    profiled = f"Profiled {outcome.profile.num_measured} points in {outcome.profile.wall_s:.0f} s"
    held_out = [entry for entry in outcome.training.operators if entry.num_held_out]
    if not (held_out or state.is_data):
        note(f"{profiled}: too few to hold some out of training and say the error")
        return
    accuracy = item_table(
        f"{profiled}; error on sizes held out of training",
        held_out,
        {
            "operator": "operator",
            "rows": "num_rows",
            "mean error": lambda entry: f"{entry.held_out_mape_ratio:.1%}",
            "inside 90 % interval": lambda entry: f"{entry.interval_coverage_ratio:.1%}",
        },
    )
    state.print_object(outcome, lambda: accuracy)


def _stop(_signal_number: int, _frame: FrameType | None) -> NoReturn:
    # As Ctrl-C: unwinding stops the service processes.
    raise KeyboardInterrupt
