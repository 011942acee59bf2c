"""`foretoken compare`: results side by side."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.picture_file import page_option
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import (
    build_table,
    open_composition,
    state_of,
)
from foretoken.app.compose import Composition
from foretoken.client.results import open_result, read_result
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.results.result import AnyReport, KeptResult
from foretoken.simulator.report.compare_runs import (
    Change,
    ComparedRun,
    compare_figures,
    configuration_of,
    list_changes,
    list_echoes,
    list_remarks,
    list_warnings,
    name_runs,
)

# A terminal shows no more differences than this.
_MAX_CHANGES = 30
_MAX_LETTERS = 48
_EXPORTED = ".zip"


def compare(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Job id, its beginning or that of its last part; `latest`, `latest~1`, ...; or the"
            " path of a file of `foretoken results export`.",
        ),
    ],
    page: Annotated[Path | None, page_option("--html")] = None,
) -> None:
    """Set results of one kind side by side: figures with their ratios, and what was asked.

    Ratios are to the first run. The page draws the runs over each other: the parts of training
    steps, their memory, communication and critical stages; latencies of deployments and their
    course; Pareto fronts and ranks of searches; capacities.

    Example: `foretoken compare latest~1 latest --page compare.html`
    """
    state = state_of(context)
    with open_composition(state) as services:
        compared = name_runs([_read(services, run) for run in runs])
        figures = compare_figures([run.report for run in compared])
        changes = list_changes([configuration_of(run.report) for run in compared])
        remarks = (*list_warnings(compared), *list_remarks(compared))
        state.print_object(
            {
                "runs": [
                    {"letter": run.letter, "result": run.result, "echo": run.report.echo}
                    for run in compared
                ],
                "figures": [_record(figure) for figure in figures],
                "changes": changes,
                "remarks": remarks,
            },
            lambda: stack(
                *_tables(compared, figures, changes),
                *(f"- {text}" for text in remarks),
                "",
                *list_echoes(compared),
            ),
        )
        if page is not None:
            from foretoken.simulator.report.page import compare_sections

            title = "Comparison: " + " against ".join(run.words for run in compared)
            write_page(page, title, compare_sections(compared))


def _record(figure: Figure) -> dict[str, object]:
    return {
        "figure": figure.label,
        "unit": figure.metric.unit,
        "values": figure.values,
        "ratios": figure.ratios,
    }


def _read(services: Composition, run: str) -> tuple[KeptResult, AnyReport]:
    """Return a result from a file, if there is one of that name, or from the catalog."""
    path = Path(run)
    if not path.is_file():
        if path.suffix == _EXPORTED:
            raise InvalidRequestError(f"there is no file {run}")
        return read_result(services.catalog, run)
    if path.suffix != _EXPORTED:
        raise InvalidRequestError(
            f"{run} is no file of `foretoken results export RUN --out FILE{_EXPORTED}`"
        )
    return open_result(path.read_bytes())


def _tables(
    runs: Sequence[ComparedRun], figures: Sequence[Figure], changes: Sequence[Change]
) -> Iterator[Table | str]:
    letters = [run.letter for run in runs]
    yield build_table(
        "Runs",
        ("run", "answer", "of", "job"),
        [(run.label, run.result.headline, run.result.title, run.result.job_id) for run in runs],
    )
    ratios = [f"{letter} / {letters[0]}" for letter in letters[1:]]
    rows = [
        (
            figure.title,
            *figure.texts(digits=4, decimals=1),
            *(figure.describe_ratio(place) for place in range(1, len(runs))),
        )
        for figure in figures
    ]
    yield build_table("", ("figure", *letters, *ratios), rows)
    if changes:
        cells = [
            (change.path, *(_cut(value) for value in change.values))
            for change in changes[:_MAX_CHANGES]
        ]
        yield build_table("", ("what differs", *letters), cells)
    if len(changes) > _MAX_CHANGES:
        yield f"and {len(changes) - _MAX_CHANGES:,} more keys; --page FILE has all"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else text[: _MAX_LETTERS - 1] + "…"
