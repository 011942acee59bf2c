"""`foretoken results`: what the catalog keeps of simulations and searches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.picture_file import page_option
from foretoken.app.cli.result_text import plain_report, result_table
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    note,
    open_composition,
    state_of,
)
from foretoken.client.results import (
    delete_result,
    export_result,
    find_result,
    list_results,
    read_result,
)
from foretoken.domain import schema
from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.results.result import REPORT_CLASSES, KeptResult

app = typer.Typer(
    help="What the catalog keeps of simulations and searches: list, show, export, delete.",
    no_args_is_help=True,
)

_RUN_HELP = (
    "Job id, its beginning or that of its last part; `latest`, or `latest~1` for the one before."
)
_KIB = 1024
# Endings of exported files.
_ZIP, _JSON = ".zip", ".json"


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
    state = state_of(context)
    with open_composition(state) as services:
        if kind:
            UnknownPluginError.look_up(kind, REPORT_CLASSES, "--kind", "kind of result")
        kept = [result for result in list_results(services.catalog) if kind in {"", result.kind}]
        shown = kept[:last]
        state.print_object(
            shown,
            lambda: build_table(
                "Results", ("job", "answer", "of", "at (UTC)", "KiB"), _rows(shown)
            ),
        )
        if len(shown) < len(kept):
            note(f"{len(kept) - len(shown):,} older ones: --last {len(kept)}")
        if not kept and not state.is_json:
            note("nothing is kept yet: results of simulations and searches will be")


def _rows(results: Sequence[KeptResult]) -> list[tuple[object, ...]]:
    return [
        (
            result.job_id,
            result.headline,
            result.title,
            result.created_at.partition(".")[0].replace("T", " "),
            -(-result.num_bytes // _KIB),
        )
        for result in results
    ]


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
    state = state_of(context)
    with open_composition(state) as services:
        result, report = read_result(services.catalog, run)
        if not state.is_json:
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
    state = state_of(context)
    with open_composition(state) as services:
        if out.suffix == _JSON:
            result, report = read_result(services.catalog, run)
            content = {"result": schema.encode(result), "report": schema.encode(report)}
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
    state = state_of(context)
    with open_composition(state) as services:
        found = {find_result(services.catalog, run).job_id for run in runs}
        for job_id in sorted(found):
            delete_result(services.catalog, job_id)
            note(f"{job_id} deleted")
