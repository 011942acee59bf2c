"""`foretoken search training`: rank the strategies of a training run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from foretoken.app.cli.asked_option import Answers, Ask
from foretoken.app.cli.exit_status import leave_unless
from foretoken.app.cli.option_group import with_option_groups
from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.picture_file import check_page_option, page_option
from foretoken.app.cli.search_training_options import (
    QuestionOptions,
    SpaceOptions,
    WatchOptions,
    build_training_request,
)
from foretoken.app.cli.search_training_text import describe_finalist, report_table
from foretoken.app.cli.state import (
    check_output_path,
    note,
    note_search,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.app.cli.table_file import check_table_option, write_columns
from foretoken.app.cli.training_launch import GenerateOptions, launch_best
from foretoken.client.job_wait import wait_for_job
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.training_search import TrainingSearchReport, TrainingSearchRequest
from foretoken.simulator.report.training_search_rows import describe_search
from foretoken.simulator.search.placement.export import check_fasop_path, write_fasop

_RESULTS = "Results"
# A stream of finalists ends with its job; what is late is in the report all the same.
_LAST_FINALIST_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where results go."""

    top: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many layouts to print, each with its best strategy.",
            rich_help_panel=_RESULTS,
        ),
    ] = 10
    page: Annotated[Path | None, page_option("--out", panel=_RESULTS, check=check_page_option)] = (
        None
    )
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write the listed strategies here, best first, as .csv, .jsonl or .parquet.",
            callback=check_table_option,
            rich_help_panel=_RESULTS,
        ),
    ] = None
    fasop: Annotated[
        Path | None,
        typer.Option(
            "--fasop",
            "--fasop-csv",
            help="Write them with the columns of FASOP here, as .csv or .jsonl.",
            callback=check_output_path,
            rich_help_panel=_RESULTS,
        ),
    ] = None


@with_option_groups
def training(  # noqa: PLR0913, PLR0917 - groups of options
    context: typer.Context,
    question: QuestionOptions,
    answers: Annotated[Answers, Ask(TrainingSearchRequest, partial=("space.",))],
    space: SpaceOptions,
    watch: WatchOptions,
    results: ResultOptions,
    generated: GenerateOptions,
    scenario: Annotated[
        Path | None,
        typer.Argument(help="Scenario file (YAML): model, device, trainer. Or options."),
    ] = None,
) -> None:
    """Find the best way to train a model on a cluster: every strategy counted.

    Every split over tensor, pipeline, data, context and expert parallelism, every micro batch,
    ZeRO stage, overlap and recomputation is checked, answered in closed form and ranked; the best
    are simulated event by event. An equals sign marks what ties with the best within the error.
    What cannot run or has not the memory is counted by its reason. The exit status is 3 where
    nothing fits.

    - 128 GPUs for Llama 2 7B with 4 Mi tokens a step: `foretoken search training --model
    llama-2-7b --gpus 128 --device a100_sxm_80 --global-batch-tokens 4194304 --page report.html`

    - Only some of the space: `... --vary tp=1,2,4,8 --vary zero_stage=1 --vary recompute=none`

    - The cheapest cluster: `... --devices h100_sxm,a100_sxm_80 --gpus 64:512 --price h100_sxm=2.5
    --price a100_sxm_80=1.4 --objective cost`

    - GPUs of two types: `... --nodes a100_sxm_80=8x8 --nodes h100_sxm=4x8 --partition dynamic`

    - From the answer to a job: `... --generate launch --framework megatron-core`

    - A scenario of your own: `foretoken search training docs/examples/training.yaml --sensitivity`

    Ctrl-C cancels the search. After a crash the same command goes on where it was. A search that a
    service runs goes on without its watcher: `--job NAME` watches it again.
    """
    state = state_of(context)
    with open_composition(state) as services:
        generated.check(has_finalists=bool(watch.job) or answers.given["num_finalists"] > 0)
        num_tokens = question.num_tokens
        if results.fasop is not None:
            check_fasop_path(results.fasop)
        simulator = services.simulator
        if watch.job:
            job = simulator.get_job(watch.job)
        else:
            request = build_training_request(scenario, question, space, answers)
            request = generated.bound_request(request)
            job = simulator.create_training_search(request)
            note_search(job)
        report = _watch(simulator, job)
        title = describe_search(report)
        state.print_object(
            report, lambda: report_table(title, report, results.top, num_tokens), report.echo
        )
        _write(report, title, results, num_tokens)
        leave_unless(report.num_fitting > 0)
        launch_best(report, generated)


def _watch(simulator: SimulatorPort, job: Job) -> TrainingSearchReport:
    """Return the report once the job has ended; tell of every finalist as soon as it is there."""
    with show_progress("search") as update, _told_finalists(simulator, job.job_id):
        wait_for_job(simulator, job, update)
    return simulator.get_training_search_report(job.job_id)


@contextmanager
def _told_finalists(simulator: SimulatorPort, job_id: str) -> Iterator[None]:
    def tell() -> None:
        # What ends the search is said by whoever waits for it.
        with suppress(ForetokenError):
            for finalist in simulator.watch_training_search(job_id):
                note(describe_finalist(finalist))

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        teller.join(_LAST_FINALIST_S)


def _write(
    report: TrainingSearchReport, title: str, results: ResultOptions, num_tokens: float
) -> None:
    if results.export is not None:
        write_columns(report.candidates, results.export)
        note(f"{len(report.candidates.name):,} strategies written to {results.export}")
    if results.fasop is not None:
        write_fasop(report, results.fasop, num_tokens)
        note(f"{len(report.candidates.name):,} strategies written to {results.fasop}")
    if results.page is not None:
        from foretoken.simulator.report.page import training_search_sections

        write_page(results.page, title, training_search_sections(report, num_tokens))
