"""`foretoken results` and `compare`: what the catalog keeps of simulations and searches."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli import search_text, search_training_text
from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.search_capacity import capacity_table
from foretoken.app.cli.simulate import serving_table, training_table
from foretoken.app.cli.simulate_run import run_table
from foretoken.app.cli.state import (
    ItemColumns,
    build_table,
    check_output_path,
    item_table,
    note,
    open_composition,
    open_services,
    stack,
    state_of,
    with_echo,
)
from foretoken.app.compose import Composition
from foretoken.client.results import (
    delete_result,
    export_result,
    find_result,
    list_results,
    open_result,
    read_result,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport, TrainingRunRequest
from foretoken.domain.results.methods import to_plain
from foretoken.domain.results.report import RequestColumns, SeriesColumns, ServingReport
from foretoken.domain.results.result import REPORT_CLASSES, AnyReport, KeptResult
from foretoken.domain.results.training_report import (
    MemoryColumns,
    SpanColumns,
    TrafficColumns,
    TrainingReport,
)
from foretoken.simulator.comparison import (
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
from foretoken.simulator.report.training_search_rows import describe_search

app = typer.Typer(
    help="What the catalog keeps of simulations and searches: list, show, export, delete.",
    no_args_is_help=True,
)

_RUN_HELP = (
    "Job id, its beginning or that of its last part; `latest`, or `latest~1` for the one before."
)
_KIB = 1024
_COLUMNS: ItemColumns[KeptResult] = {
    "job": "job_id",
    "answer": "headline",
    "of": "title",
    "at (UTC)": lambda result: result.created_at.partition(".")[0].replace("T", " "),
    "KiB": lambda result: -(-result.num_bytes // _KIB),
}
# Endings of exported files.
_ZIP, _JSON = ".zip", ".json"
# A terminal shows no more differences than this.
_MAX_CHANGES = 30
_MAX_LETTERS = 48
_EXPORTED = ".zip"
# As many layouts as searches print by default.
_NUM_SHOWN = 10


def _check_export(path: Path) -> Path:
    if path.suffix not in {_ZIP, _JSON}:
        raise typer.BadParameter(f"{path} must end in {_ZIP} or {_JSON}")
    check_output_path(path)
    return path


@app.command("list")
def list_kept(
    context: typer.Context,
    kind: Annotated[
        str, typer.Option(help=f"Only these: {', '.join(REPORT_CLASSES)}.", show_default=False)
    ] = "",
    last: Annotated[int, typer.Option(min=1, help="How many to list at most.")] = 50,
) -> None:
    """List the kept results, newest first.

    Every simulation and search that succeeds is kept, up to `simulator.max_kept_results` of them.

    Example: `foretoken results list --kind training`
    """
    with open_services(context) as (state, services):
        if kind:
            UnknownPluginError.look_up(kind, REPORT_CLASSES, "--kind", "kind of result")
        kept = [result for result in list_results(services.catalog) if kind in {"", result.kind}]
        shown = kept[:last]
        state.print_object(shown, lambda: item_table("Results", shown, _COLUMNS))
        if len(shown) < len(kept):
            note(f"{len(kept) - len(shown):,} older ones: --last {len(kept)}")
        if not kept and not state.is_data:
            note("nothing is kept yet: results of simulations and searches will be")


@app.command()
def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)] = "latest",
    page: Annotated[
        Path | None,
        page_option("--html"),
    ] = None,
) -> None:
    """Show a result as the command that made it did.

    Example: `foretoken results show latest --page again.html`
    """
    with open_services(context) as (state, services):
        result, report = read_result(services.catalog, run)
        if not state.is_data:
            note(f"{result.job_id}, {result.created_at}: {result.headline}")
        state.print_object(plain_report(report), lambda: result_table(result.title, report))
        if page is not None:
            from foretoken.simulator.report.page import result_sections

            write_page(page, result.title, result_sections(report))


@app.command()
def export(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write: .zip (the report and its tables as Parquet, which `foretoken"
            " compare` reads), or .json (all in one text).",
            callback=_check_export,
        ),
    ],
) -> None:
    """Write a result to a file, to keep it or to compare it elsewhere.

    Example: `foretoken results export latest --out before.zip`
    """
    with open_composition(state_of(context)) as services:
        if out.suffix == _JSON:
            result, report = read_result(services.catalog, run)
            content = {"result": schema.encode(result), "report": to_plain(report)}
            out.write_text(json.dumps(content, indent=1), encoding="utf-8")
        else:
            result = find_result(services.catalog, run)
            out.write_bytes(export_result(services.catalog, result.job_id))
    note(f"{result.job_id} written to {out}")


@app.command()
def delete(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help=_RUN_HELP)],
) -> None:
    """Delete results from the catalog.

    All of them are looked up before the first is deleted.

    Example: `foretoken results delete latest latest~1`
    """
    with open_composition(state_of(context)) as services:
        found = {find_result(services.catalog, run).job_id for run in runs}
        for job_id in sorted(found):
            delete_result(services.catalog, job_id)
            note(f"{job_id} deleted")


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
    with open_services(context) as (state, services):
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


def result_table(title: str, report: AnyReport) -> Table:
    """Return the tables of a report below each other, and what it rests on."""
    return with_echo(_table(title, report), report.echo)


def _table(title: str, report: AnyReport) -> Table:
    if isinstance(report, TrainingReport):
        return training_table(title, report)
    if isinstance(report, TrainingRunReport):
        request = schema.decode(TrainingRunRequest, json.loads(report.request_json), "request")
        return run_table(request, report)
    if isinstance(report, ServingReport):
        return serving_table(title, [report])
    if isinstance(report, CapacityReport):
        return capacity_table(title, report)
    if isinstance(report, ServingSearchReport):
        return search_text.report_table(title, report, _NUM_SHOWN)
    return search_training_text.report_table(describe_search(report), report, _NUM_SHOWN)


def plain_report(report: AnyReport) -> AnyReport:
    """Return a report without its long columns; those of a search's candidates stay."""
    if isinstance(report, ServingReport):
        return _without_requests(report)
    if isinstance(report, CapacityReport):
        return replace(report, at_capacity=_without_requests(report.at_capacity))
    if isinstance(report, TrainingReport):
        return replace(
            report, spans=SpanColumns(), memory_timeline=MemoryColumns(), traffic=TrafficColumns()
        )
    return report


def _without_requests(report: ServingReport) -> ServingReport:
    return replace(report, requests=RequestColumns(), series=SeriesColumns())
