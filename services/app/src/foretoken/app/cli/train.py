"""`foretoken train`: learn latency models from the catalog."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.picture_file import page_option
from foretoken.app.cli.state import (
    build_table,
    format_ratio,
    note,
    open_composition,
    show_progress,
    state_of,
)
from foretoken.app.compose import Composition
from foretoken.client.job_wait import wait_for_job
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.ports import TrainRequest
from foretoken.domain.results.report import PredictorTrainingReport

_SCORES = ("held out", "MAPE", "P90", "covered")


def train(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Only this device's measurements.")] = "",
    operator: Annotated[str, typer.Option(help="Only this operator.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of folds and sampling.", min=0)] = 0,
    splits: Annotated[
        bool, typer.Option("--splits", help="A row for each kind of points left out.")
    ] = False,
    report: Annotated[Path | None, page_option("--report")] = None,
    job: Annotated[
        str, typer.Option(help="Train nothing, and show what this training found.")
    ] = "",
) -> None:
    """Train latency models on all measurements in the catalog and make them the active ones.

    The table shows how well each model predicts points it was not trained on, as the mean (MAPE)
    and the 90th percentile (P90) of the error, and how often its 90 % interval covered the truth.
    """
    state = state_of(context)
    request = TrainRequest(device=device, operator=operator, seed=seed)
    with open_composition(state) as services:
        if job and request != TrainRequest():
            reason = "a past training has its own device, operator and seed"
            raise InvalidRequestError.of_field("--job", reason)
        job_id = job or _train(services, request)
        found = services.predictor.get_training_report(job_id)
        state.print_object(found, lambda: training_table(found, is_by_split=splits))
        if not job:
            note(f"to see this again: foretoken train --job {job_id}")
        if report is not None:
            from foretoken.predictor.report.page import write_page

            write_page(found, report)
            note(f"page written to {report}")


def training_table(report: PredictorTrainingReport, *, is_by_split: bool) -> Table:
    """Return the table of a report: a row per operator and device, or per split of each."""
    title = (
        f"Model {report.model_version} from {report.num_rows:,} rows"
        f" in {report.cpu_s:.1f} CPU seconds"
    )
    if report.num_reused:
        title += f"; {report.num_reused:,} kept from before"
    if is_by_split:
        columns = ("device", "operator", "split", *_SCORES)
        return build_table(title, columns, list(_rows_by_split(report)))
    return build_table(title, ("device", "operator", "rows", *_SCORES), list(_rows(report)))


def _train(services: Composition, request: TrainRequest) -> str:
    """Return the id of the training once it has ended, however it did."""
    created = services.predictor.create_training(request)
    with show_progress("train") as update:
        wait_for_job(services.predictor, created, update)
    return created.job_id


def _rows(report: PredictorTrainingReport) -> Iterator[tuple[object, ...]]:
    for entry in report.operators:
        yield (
            entry.device,
            entry.operator,
            entry.num_rows,
            *_score_cells(
                entry.num_held_out,
                entry.held_out_mape_ratio,
                entry.held_out_p90_ratio,
                entry.interval_coverage_ratio,
            ),
        )


def _rows_by_split(report: PredictorTrainingReport) -> Iterator[tuple[object, ...]]:
    for entry in report.operators:
        for score in entry.splits:
            yield (
                entry.device,
                entry.operator,
                score.split,
                *_score_cells(
                    score.num_held_out,
                    score.mape_ratio,
                    score.p90_ratio,
                    score.interval_coverage_ratio,
                ),
            )


def _score_cells(num_held_out: int, *ratios: float) -> tuple[object, ...]:
    return (num_held_out, *(format_ratio(ratio, num_held_out) for ratio in ratios))
