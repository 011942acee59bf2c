"""`foretoken catalog`: bring measurements in, and see what is there."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.state import note, open_composition, parse_assignments, state_of
from foretoken.catalog.importing import ImportRequest, all_importers, find_importer

app = typer.Typer(help="Bring measurements in, and see what is there.", no_args_is_help=True)


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
        list[str] | None, typer.Option(help="An option of the format: NAME=VALUE. Repeatable.")
    ] = None,
) -> None:
    """Import another tool's measurements.

    All files are read and checked before the first row is stored, and the rows become visible
    together. Importing the same files again changes nothing.

    Example: `foretoken catalog import vidur profiling --device a30`
    """
    state = state_of(context)
    with open_composition(state) as services:
        request = ImportRequest(
            path=path,
            device=device,
            topology=topology,
            options=parse_assignments(option or []),
        )
        note(f"reading {path}")
        plan = find_importer(source_format).read(request)
        receipts = list(services.catalog.record(plan.run, plan.batches))
        for line in plan.notes:
            note(f"note: {line}")
        num_rows = sum(receipt.num_rows for receipt in receipts)
        num_flagged = sum(receipt.num_flagged for receipt in receipts)
        was_there = all(receipt.was_duplicate for receipt in receipts)
        state.print_rows(
            f"Imported {source_format}",
            ("run", "rows", "flagged", "already there"),
            [(plan.run.run_id, num_rows, num_flagged, "yes" if was_there else "no")],
        )


@app.command()
def formats(context: typer.Context) -> None:
    """List the formats that can be imported."""
    rows = [(name, importer.summary) for name, importer in all_importers().items()]
    state_of(context).print_rows("Formats", ("format", "what it reads"), rows)


@app.command()
def coverage(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Only this device.")] = "",
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
            if device in ("", entry.device)
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
