"""`foretoken catalog`: bring measurements in and out, see what is there, and draw it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from foretoken.app.cli import catalog_upkeep
from foretoken.app.cli.catalog_upkeep import Where, selection_of
from foretoken.app.cli.output_file import check_page_option, check_picture_option
from foretoken.app.cli.predictor import train_models, training_table
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    CliState,
    note,
    open_composition,
    open_services,
    parse_assignments,
    show_progress,
    state_of,
)
from foretoken.app.compose import Composition
from foretoken.app.importing import find_summary, record_plan
from foretoken.catalog.exporting import ExportRequest, all_exporters, find_exporter
from foretoken.catalog.importing import ImportPlan, ImportRequest, all_importers, find_importer
from foretoken.catalog.installing import (
    KEPT,
    InstallRequest,
    open_install,
    open_kept,
    publish_dataset,
)
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import MeasuredSubject
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.measured_curves import FittedCurve, fit_curves, read_curves
from foretoken.wire.arrow import read_table

app = typer.Typer(
    help="Bring measurements in and out, and see what is there.", no_args_is_help=True
)
app.add_typer(catalog_upkeep.snapshots, name="snapshots")
for command in catalog_upkeep.COMMANDS:
    app.command()(command)

# The option that every import takes here and that is no option of a format.
_MODEL = "model"
# DuckDB keeps what it has written as long as there is room: 17 million rows took 1.4 GB.
_IMPORT_MEMORY = "256MB"
_MODEL_HELP = "only this one, or what the files do not say"
_COUNTS = {name: f"num_{name}" for name in ("rows", "flagged", "failed")}


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

    The rows become visible together. Importing the same files again changes nothing, and goes on
    with what was cut short.

    Example: `foretoken catalog import vidur profiling --device a30`
    """
    state = state_of(context)
    with open_composition(_with_little_memory(state)) as services:
        options = dict(parse_assignments(option or []))
        request = ImportRequest(
            path=path,
            device=device,
            topology=topology,
            model=options.pop(_MODEL, ""),
            options=options,
        )
        note(f"reading {path}")
        _import(state, services, find_importer(source_format).read(request))


def _with_little_memory(state: CliState) -> CliState:
    """Return the state of a command that writes, and rereads little of what it has written."""
    catalog = {"memory_limit": _IMPORT_MEMORY, **state.config.catalog}
    return state.with_config(replace(state.config, catalog=catalog))


@app.command()
@with_option_groups
def install(
    context: typer.Context,
    request: InstallRequest,
    train: Annotated[bool, typer.Option("--train", help="Train the models afterwards.")] = False,
) -> None:
    """Bring in measurements that others publish, and say whose they are.

    NVIDIA's tables are read out of their wheel, which pip downloads from the index it is configured
    for. The run keeps version, licence and SHA-256. Installing again changes nothing.
    `kept` are the tables that earlier versions had no operators for, and kept as files.

    Example: `foretoken catalog install nvidia --systems h200_sxm --engines vllm/0.24.0 --train`
    """
    state = state_of(context)
    with open_composition(_with_little_memory(state)) as services, ExitStack() as held:
        with show_progress(f"fetching {request.dataset}") as bar:
            is_kept = request.dataset == KEPT
            opened = open_kept(services.catalog) if is_kept else open_install(request, bar.set)
            plan = held.enter_context(opened)
        note(f"{plan.run.source or request.dataset}, licence {plan.run.licence or 'not said'}")
        for device, num_rows in sorted(plan.device_rows.items()):
            note(f"  {device}: {num_rows:,} rows")
        _import(state, services, plan)
    if train:
        with open_composition(state) as services:
            report = train_models(services, TrainRequest())
            state.print_object(report, lambda: training_table(report, is_by_split=False))


@app.command()
def publish(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Folder to write, empty or not there yet.")],
    where: Where = None,
    licence: Annotated[
        str, typer.Option(help="Of the rows whose runs say none, such as `CC-BY-4.0`.")
    ] = "",
) -> None:
    """Write a dataset for others: Parquet files, a manifest, licences, and a card that says it all.

    `catalog install` reads it, as a folder, a ZIP archive of it, or the archive's URL.

    Example: `foretoken catalog publish h200-rows --where device=h200_sxm --licence CC-BY-4.0`
    """
    with open_services(context) as (state, services):
        report = publish_dataset(services.catalog, path, selection_of(where), licence)
        state.print_rows(
            "Published",
            ("folder", "rows", "files"),
            [(str(path), report.num_rows, len(report.files))],
        )


def _import(state: CliState, services: Composition, plan: ImportPlan) -> None:
    """Record a plan, and say what became of it."""
    with show_progress(f"storing {plan.num_rows:,} rows") as update:
        was_there = record_plan(services.catalog, plan, update.set)
    for line in plan.notes:
        note(f"note: {line}")
    summary = find_summary(services.catalog, plan)
    num_raw = sum(table.num_rows for table in plan.raw_tables)
    state.print_rows(
        f"Imported {plan.run.tool}",
        ("run", "rows", "flagged", "failed", "kept raw", "left out", "already there"),
        [
            (
                plan.run.run_id,
                summary.num_rows,
                summary.num_flagged,
                summary.num_failed,
                num_raw,
                plan.remarks.num_passed,
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
    with open_services(context) as (state, services):
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
    device: Annotated[str, typer.Option(help="Only this device.", callback=canonical_device)] = "",
    operator: Annotated[str, typer.Option(help="Only this operator.")] = "",
) -> None:
    """Show how many measurements there are per operator and device."""
    with open_services(context) as (state, services):
        found = services.catalog.describe_coverage()
        # What was measured need not be known here, but what is neither is a slip of the pen.
        if device not in {"", *(entry.device for entry in found)}:
            find_device(device)
        if operator not in {"", *(entry.operator for entry in found)}:
            find_operator(operator)
    state.print_items(
        "Coverage",
        [
            entry
            for entry in found
            if device in ("", entry.device) and operator in ("", entry.operator)
        ],
        {
            **{name: name for name in ("device", "operator", "phase", "dtype")},
            "topology": lambda entry: entry.topology or "-",
            **_COUNTS,
            "frameworks": lambda entry: ", ".join(entry.frameworks) or "-",
        },
    )


@app.command()
def runs(context: typer.Context) -> None:
    """List profiling runs and imports, newest first."""
    with open_services(context) as (state, services):
        found = services.catalog.list_runs()
    state.print_items(
        "Runs",
        found,
        {
            "run": lambda entry: entry.run.run_id,
            "tool": lambda entry: entry.run.tool,
            "kind": lambda entry: entry.run.kind.name.lower(),
            "started": "started_at",
            **_COUNTS,
            "state": lambda entry: "complete" if entry.completed_at else "open",
        },
    )


@app.command()
def devices(context: typer.Context) -> None:
    """List the devices that were measured."""
    with open_services(context) as (state, services):
        _print_subjects(state, "device", services.catalog.list_devices())


@app.command()
def models(context: typer.Context) -> None:
    """List the models whose layers were measured."""
    with open_services(context) as (state, services):
        _print_subjects(state, "model", services.catalog.list_models())


def _print_options(state: CliState, name: str) -> None:
    """Print what `--option` takes in a format's commands."""
    importer, exporter = all_importers().get(name), all_exporters().get(name)
    if importer is None and exporter is None:
        raise UnknownPluginError.named(name, {**all_importers(), **all_exporters()})
    importing = {_MODEL: _MODEL_HELP, **importer.all_options} if importer else {}
    exporting = exporter.options if exporter else {}
    rows = [("import", *option) for option in importing.items()]
    rows += [("export", *option) for option in exporting.items()]
    state.print_rows(f"Options of {name}", ("command", "option", "what"), rows)


def _print_subjects(state: CliState, kind: str, subjects: Sequence[MeasuredSubject]) -> None:
    columns = {kind: "name", **_COUNTS, "operators": "num_operators", "runs": "num_runs"}
    state.print_items(f"Measured {kind}s", subjects, columns)


@app.command()
def plot(
    context: typer.Context,
    operator: Annotated[
        list[str],
        typer.Option(help="Operator: see `foretoken list operators`. Repeatable."),
    ],
    where: Where = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write a page with all pictures here.", callback=check_page_option),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Write the curves of one operator here, as .png, .svg or .pdf.",
            callback=check_picture_option,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Device: see `foretoken list devices`.", callback=canonical_device),
    ] = "",
) -> None:
    """Draw what was measured of operators, and what the predictor makes of it.

    Collectives: bandwidth over the bytes of the message, a panel for each group of devices per node
    and nodes. Products and others: FLOP/s, or bytes/s, over the first dimension, a panel for each
    shape. Prints how far the curve is from the points.

    Example: `foretoken catalog plot --device a100_sxm_80 --operator all_reduce --page curves.html`
    """
    with open_services(context) as (state, services):
        curves: list[FittedCurve] = []
        for name in operator:
            curves += _read_curves(services, name, device, where or [])
        if picture is not None:
            _write_picture(picture, curves)
        if page is not None:
            from foretoken.simulator.report.profile_curves import render_profile

            title = f"{', '.join(operator)}{f' on {device}' if device else ''}"
            page.write_text(render_profile(title, curves), encoding="utf-8")
            note(f"page written to {page}")
        state.print_rows(
            "Measured and fitted",
            ("operator", "device", "curve", "points", "median error", "worst error", "rests on"),
            [_curve_row(curve) for curve in curves],
        )


def _read_curves(
    services: Composition, operator: str, device: str, where: Sequence[str]
) -> Sequence[FittedCurve]:
    words = [*where, f"operator={find_operator(operator).name}"]
    selection = selection_of([*words, *([f"device={device}"] if device else [])])
    found = read_curves(read_table(services.catalog.read_measurements(selection)))
    if not found:
        raise InvalidRequestError.of_field(
            "--operator",
            f"nothing was measured of {operator}{f' on {device}' if device else ''};"
            " `foretoken catalog coverage` lists what was, and `--where"
            " include_flagged=true` takes flagged rows too",
        )
    return fit_curves(found, services.predictor, selection.framework)


def _write_picture(path: Path, curves: Sequence[FittedCurve]) -> None:
    from foretoken.simulator.report.profile_curves import write_profile_figure

    places = {(c.measured.key.operator, c.measured.key.device) for c in curves}
    if len(places) > 1:
        raise InvalidRequestError.of_field(
            "--picture", "is of one operator on one device; use --page for several"
        )
    write_profile_figure(path, curves)
    note(f"picture written to {path}")


def _curve_row(curve: FittedCurve) -> tuple[object, ...]:
    return (
        curve.measured.key.operator,
        curve.measured.key.device,
        curve.measured.key.title,
        len(curve.measured.sizes),
        f"{float(np.median(np.abs(curve.error_ratio))):.1%}",
        f"{float(np.max(np.abs(curve.error_ratio))):.1%}",
        curve.provenance,
    )
