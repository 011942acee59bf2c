"""`foretoken catalog`: bring measurements in and out, and see what is there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli import (
    catalog_artifacts,
    catalog_plot,
    catalog_snapshots,
    catalog_upkeep,
)
from foretoken.app.cli.catalog_snapshots import Where, selection_of
from foretoken.app.cli.state import (
    CliState,
    fail,
    note,
    open_composition,
    parse_assignments,
    show_progress,
    state_of,
)
from foretoken.catalog.exporting import ExportRequest, all_exporters, find_exporter
from foretoken.catalog.importing import ImportPlan, ImportRequest, all_importers, find_importer
from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.measurements.measurement import MeasuredSubject
from foretoken.domain.ports import CatalogPort

app = typer.Typer(
    help="Bring measurements in and out, and see what is there.", no_args_is_help=True
)
app.add_typer(catalog_snapshots.app, name="snapshots")
app.command("artifacts")(catalog_artifacts.list_artifacts)
app.command("plot")(catalog_plot.plot)
app.command("sql")(catalog_upkeep.sql)
app.command("check")(catalog_upkeep.check)
app.command("backup")(catalog_upkeep.backup)
app.command("restore")(catalog_upkeep.restore)
app.command("recover")(catalog_upkeep.recover)
app.command("prune")(catalog_upkeep.prune)
app.command("compact")(catalog_upkeep.compact)

# The option that every import takes here and that is no option of a format.
_MODEL = "model"
_MODEL_HELP = "only this one, or what the files do not say"


@app.command("import")
def import_measurements(
    context: typer.Context,
    source_format: Annotated[
        str, typer.Argument(metavar="FORMAT", help="Whose files: see `catalog formats`.")
    ],
    path: Annotated[Path, typer.Argument(help="File or folder to import.")],
    device: Annotated[
        str, typer.Option(help="Only this device, or what the files do not say themselves.")
    ] = "",
    topology: Annotated[str, typer.Option(help="Topology of collective measurements.")] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help=f"NAME=VALUE: `{_MODEL}` ({_MODEL_HELP}), `source`, `licence`, or an option of the"
            " format: see `catalog formats FORMAT`. Repeatable."
        ),
    ] = None,
) -> None:
    """Import another tool's measurements.

    All files are read and checked before the first row is stored, and the rows become visible
    together. Importing the same files again changes nothing.

    Example: `foretoken catalog import vidur profiling --device a30`
    """
    state = state_of(context)
    with open_composition(state) as services:
        options = dict(parse_assignments(option or []))
        request = ImportRequest(
            path=path,
            device=device,
            topology=topology,
            model=options.pop(_MODEL, ""),
            options=options,
        )
        note(f"reading {path}")
        plan = find_importer(source_format).read(request)
        for line in plan.notes:
            note(f"note: {line}")
        was_there = _record(services.catalog, plan)
        summary = next(
            found for found in services.catalog.list_runs() if found.run.run_id == plan.run.run_id
        )
        state.print_rows(
            f"Imported {source_format}",
            ("run", "rows", "flagged", "failed", "already there"),
            [
                (
                    plan.run.run_id,
                    summary.num_rows,
                    summary.num_flagged,
                    summary.num_failed,
                    "yes" if was_there else "no",
                )
            ],
        )


@app.command("export")
def export_measurements(
    context: typer.Context,
    target_format: Annotated[
        str, typer.Argument(metavar="FORMAT", help="For whom: see `catalog formats`.")
    ],
    path: Annotated[Path, typer.Argument(help="Folder to write, empty or not there yet.")],
    where: Where = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of the format: NAME=VALUE; see `catalog formats FORMAT`. Repeatable."
        ),
    ] = None,
) -> None:
    """Write measurements as another tool's files, or as a Parquet dataset.

    Example: `foretoken catalog export parquet measurements --where device=a30`
    """
    state = state_of(context)
    with open_composition(state) as services:
        exporter = find_exporter(target_format)
        selection = exporter.narrow(selection_of(where))
        request = ExportRequest(
            path=path,
            selection=selection,
            runs=[found.run for found in services.catalog.list_runs()],
            options=parse_assignments(option or []),
        )
        rows = services.catalog.read_measurements(selection)
        report = exporter.write(rows, request)
        for line in report.notes:
            note(f"note: {line}")
        state.print_rows(
            f"Exported {target_format}",
            ("folder", "rows", "files"),
            [(str(path), report.num_rows, len(report.files))],
        )


@app.command()
def formats(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="[FORMAT]", help="Show the options of this one.")
    ] = "",
) -> None:
    """List the formats that can be imported and exported, or the options of one.

    Example: `foretoken catalog formats vidur`
    """
    state = state_of(context)
    if name:
        _print_options(state, name)
        return
    importers, exporters = all_importers(), all_exporters()
    rows = [
        (
            name,
            "yes" if name in importers else "no",
            "yes" if name in exporters else "no",
            (importers.get(name) or exporters[name]).summary,
        )
        for name in sorted({*importers, *exporters})
    ]
    state.print_rows("Formats", ("format", "import", "export", "what"), rows)


@app.command()
def coverage(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Only this device.")] = "",
    operator: Annotated[str, typer.Option(help="Only this operator.")] = "",
) -> None:
    """Show how many measurements there are per operator and device."""
    state = state_of(context)
    with open_composition(state) as services:
        rows = [
            (
                entry.device,
                entry.operator,
                entry.phase,
                entry.dtype,
                entry.topology or "-",
                entry.num_rows,
                entry.num_flagged,
                entry.num_failed,
                ", ".join(entry.frameworks) or "-",
            )
            for entry in services.catalog.describe_coverage()
            if device in ("", entry.device) and operator in ("", entry.operator)
        ]
    columns = (
        "device",
        "operator",
        "phase",
        "dtype",
        "topology",
        "rows",
        "flagged",
        "failed",
        "frameworks",
    )
    state.print_rows("Coverage", columns, rows)


@app.command()
def runs(context: typer.Context) -> None:
    """List profiling runs and imports, newest first."""
    state = state_of(context)
    with open_composition(state) as services:
        rows = [
            (
                entry.run.run_id,
                entry.run.tool,
                entry.run.kind.name.lower(),
                entry.started_at,
                entry.num_rows,
                entry.num_flagged,
                entry.num_failed,
                "complete" if entry.completed_at else "open",
            )
            for entry in services.catalog.list_runs()
        ]
    columns = ("run", "tool", "kind", "started", "rows", "flagged", "failed", "state")
    state.print_rows("Runs", columns, rows)


@app.command()
def devices(context: typer.Context) -> None:
    """List the devices that were measured."""
    state = state_of(context)
    with open_composition(state) as services:
        _print_subjects(state, "device", services.catalog.list_devices())


@app.command()
def models(context: typer.Context) -> None:
    """List the models whose layers were measured."""
    state = state_of(context)
    with open_composition(state) as services:
        _print_subjects(state, "model", services.catalog.list_models())


def _print_options(state: CliState, name: str) -> None:
    """Print what `--option` takes in a format's commands."""
    importer, exporter = all_importers().get(name), all_exporters().get(name)
    if importer is None and exporter is None:
        fail(UnknownPluginError.named(name, {**all_importers(), **all_exporters()}))
    importing = {_MODEL: _MODEL_HELP, **importer.all_options} if importer else {}
    exporting = exporter.options if exporter else {}
    rows = [("import", *option) for option in importing.items()]
    rows += [("export", *option) for option in exporting.items()]
    state.print_rows(f"Options of {name}", ("command", "option", "what"), rows)


def _record(catalog: CatalogPort, plan: ImportPlan) -> bool:
    """Record a plan with a progress bar, and return whether all of it was there before."""
    num_rows, was_there = 0, True
    with show_progress(f"storing {plan.num_rows:,} rows") as update:
        for receipt in catalog.record(plan.run, plan.batches):
            num_rows += receipt.num_rows
            was_there &= receipt.was_duplicate
            update.set(num_rows / plan.num_rows, f"{num_rows:,} rows")
    return was_there


def _print_subjects(state: CliState, kind: str, subjects: Sequence[MeasuredSubject]) -> None:
    rows = [
        (
            subject.name,
            subject.num_rows,
            subject.num_flagged,
            subject.num_failed,
            subject.num_operators,
            subject.num_runs,
        )
        for subject in subjects
    ]
    columns = (kind, "rows", "flagged", "failed", "operators", "runs")
    state.print_rows(f"Measured {kind}s", columns, rows)
