"""`foretoken catalog sql`, `check`, `backup`, snapshots, artifacts: a closer look, and upkeep."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.cli.option_text import parse_s
from foretoken.app.cli.output_file import check_table_option, page_option, write_table
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    CliState,
    ItemColumns,
    build_table,
    check_output_path,
    item_table,
    note,
    open_composition,
    open_services,
    parse_assignments,
    show_progress,
    state_of,
)
from foretoken.app.compose import recover_catalog, restore_catalog
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import (
    CheckRequest,
    MeasurementFilter,
    PruneRequest,
    QualityFinding,
    QualityReport,
    Snapshot,
    SqlQuery,
)
from foretoken.domain.plugins import parse_yaml_value
from foretoken.domain.ports import CatalogAdminPort, CatalogPort
from foretoken.wire.arrow import read_table

_MIB = 2**20
snapshots = typer.Typer(
    help="Versions of the data: immutable, named by a hash of their content.", no_args_is_help=True
)

Hash = Annotated[str, typer.Argument(metavar="HASH", help="Its content hash, or the beginning.")]

Where = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these: `device=a30`, `operator=gemm`, `model=llama-3.1-8b`, `framework='vllm"
        " 0.19'`, `topology=`, `run_id=`, `snapshot=`; `include_flagged=true` and"
        " `include_failed=true` take flagged and failed rows too. Repeatable."
    ),
]

# As many digits of a hash as people compare.
_SHORT = 12
_KINDS = SqlQuery(text="SELECT DISTINCT kind FROM artifacts ORDER BY kind")


def sql(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="One SELECT statement; `-` reads it from stdin.")],
    max_rows: Annotated[int, typer.Option(min=1, help="Show at most this many rows.")] = 100,
    timeout: Annotated[
        str,
        typer.Option(
            help="How long it may run: `30s`, `2min`. Default: as long as the catalog allows."
        ),
    ] = "",
    save: Annotated[
        Path | None, typer.Option(help="Write all rows to this .parquet or .csv file instead.")
    ] = None,
) -> None:
    """Ask the catalog in SQL. Nothing can be changed, and no file or network be reached.

    There is a view for every operator, named `op_gemm` and so on, whose dimensions are columns, and
    one for all operators together, `measurements`.

    Example: `foretoken catalog sql "SELECT device, count(*) FROM op_gemm GROUP BY device"`
    """
    state = state_of(context)
    text = typer.get_text_stream("stdin").read() if query == "-" else query
    target = check_table_option(save)
    # One more than is shown tells whether there are more.
    limit = 0 if target else max_rows + 1
    with open_composition(state) as services:
        timeout_s = parse_s(timeout, "--timeout") if timeout else 0.0
        question = SqlQuery(text=text, max_num_rows=limit, timeout_s=timeout_s)
        table = read_table(services.catalog.query_sql(question))
        if target is not None:
            write_table(table, target)
            note(f"{table.num_rows:,} rows in {target}")
            return
        rows = [[_plain(cell) for cell in row.values()] for row in table.to_pylist()[:max_rows]]
        names = table.schema.names
        state.print_rows(f"{len(rows):,} rows", names, rows, keys=names)
        if table.num_rows > max_rows:
            note("there are more rows; --max-rows shows them, --save writes all of them")


@with_option_groups
def check(
    context: typer.Context,
    request: CheckRequest,
    report: Annotated[Path | None, page_option("--report")] = None,
) -> None:
    """Judge stored measurements again, all runs together, and flag what cannot be trusted.

    Flagged rows are kept, with the reason, and are not trained on. A flag that no longer holds is
    withdrawn. Snapshots keep the flags they had.
    """
    with open_services(context) as (state, services):
        with show_progress("check") as update:
            found = services.foretoken("catalog").check(request, on_progress=update)
        if report is not None:
            _write_page(services.catalog, request, found, report)
            note(f"report: {report}")
        columns: ItemColumns[QualityFinding] = {
            **{name: name for name in ("test", "device", "operator", "phase")},
            "kernel": lambda finding: finding.kernel or finding.framework or "-",
            **{name: f"num_{name}" for name in ("rows", "flagged", "new")},
            "example": "example",
        }
        title = (
            f"{found.num_rows:,} rows judged in {found.wall_s:.1f} s: {found.num_flagged:,} flagged"
            f" ({found.num_new:,} new, {found.num_withdrawn:,} withdrawn),"
            f" {found.num_failed:,} failed"
        )
        state.print_object(found, lambda: item_table(title, found.findings, columns))


def backup(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Copy the catalog to a file while it goes on recording.

    Example: `foretoken catalog backup catalog-$(date +%F).duckdb`
    """
    target = check_output_path(path)
    if target is None or target.exists():
        raise typer.BadParameter(f"{path} exists; name a new file")
    partial = target.with_name(target.name + ".partial")
    num_bytes = 0
    with open_composition(state_of(context)) as services, show_progress("backup") as update:
        try:
            with partial.open("xb") as file:
                for piece in services.catalog.backup():
                    num_bytes += file.write(piece)
                    update.set(0.0, f"{num_bytes / _MIB:,.0f} MiB")
                file.flush()
                os.fsync(file.fileno())
            partial.rename(target)
        except FileExistsError as err:
            raise InvalidRequestError.of_field("path", f"{partial} is in the way") from err
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    note(f"{num_bytes / _MIB:,.1f} MiB in {target}")


def restore(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="File that `catalog backup` wrote.")],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Put it in place of the present catalog, which is kept."),
    ] = False,
) -> None:
    """Make a backup the catalog of this configuration. No process may have that open."""
    state = state_of(context)
    target, kept = restore_catalog(state.config, path, is_replacing=replace)
    if kept is not None:
        note(f"the catalog that was there is now {kept}")
    note(f"restored {target}")


def recover(
    context: typer.Context,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Go on without what is missing; it is recorded what that was."
        ),
    ] = False,
) -> None:
    """Say what a catalog that does not open lacks, or go on without it.

    No process may have it open. Runs whose batches are missing can be sent again; what is there is
    recognised.
    """
    state = state_of(context)
    target, found = recover_catalog(state.config, is_accepting_loss=accept_loss)
    if not found.description:
        note(f"{target} holds all that it acknowledged")
        return
    note(f"accepted: {found.description}")
    if found.kept_log is not None:
        note(f"the damaged log is now {found.kept_log}")


@with_option_groups
def prune(context: typer.Context, request: PruneRequest) -> None:
    """Delete old runs, but none that a snapshot, and so a trained model, needs."""
    with open_services(context) as (state, services):
        found = services.catalog.prune(request)
    fate = "would go" if request.is_dry_run else "deleted"
    rows = [
        *((run_id, fate) for run_id in found.deleted_run_ids),
        *((run_id, "kept: a snapshot needs it") for run_id in found.kept_run_ids),
    ]
    title = f"{found.num_deleted_rows:,} rows {fate}"
    state.print_object(found, lambda: build_table(title, ("run", "what"), rows))


def compact(context: typer.Context) -> None:
    """Give room that deleted rows left back to the disk."""
    with open_services(context) as (state, services):
        found = services.catalog.compact()
    row = (found.bytes_before / _MIB, found.bytes_after / _MIB, found.wall_s)
    columns = ("before (MiB)", "after (MiB)", "seconds")
    state.print_object(found, lambda: build_table("Compacted", columns, [row]))


def _write_page(
    catalog: CatalogPort, request: CheckRequest, found: QualityReport, path: Path
) -> None:
    # Every other command would wait for what only the page needs.
    from foretoken.catalog.quality.page import write_quality_page

    selection = MeasurementFilter(
        device=request.device,
        operator=request.operator,
        run_id=request.run_id,
        include_flagged=True,
    )
    write_quality_page(found, catalog.read_measurements(selection), path)


def _plain(cell: Any) -> object:
    """Return a cell as JSON has it; text for what JSON has not."""
    return cell if cell is None or isinstance(cell, str | int | float | bool) else str(cell)


@snapshots.command("list")
def list_snapshots(context: typer.Context) -> None:
    """List the stored snapshots, newest first."""
    with open_services(context) as (state, services):
        _print_snapshots(state, "Snapshots", services.catalog.list_snapshots())


@snapshots.command()
def create(
    context: typer.Context,
    where: Where = None,
    holder: Annotated[
        str, typer.Option(help="Who needs it; a held snapshot cannot be deleted.")
    ] = "",
) -> None:
    """Keep what is selected now; its rows stay readable whatever is recorded later.

    Example: `foretoken catalog snapshots create --where device=a30 --holder "paper, table 2"`
    """
    with open_services(context) as (state, services):
        snapshot = services.catalog.create_snapshot(selection_of(where), holder)
        _print_snapshots(state, "Snapshot", [snapshot])


@snapshots.command()
def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="Hash of the earlier one.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Hash of the later one.")],
) -> None:
    """Show where the rows of two snapshots differ."""
    with open_services(context) as (state, services):
        found = services.catalog.diff_snapshots(before, after)
    title = (
        f"From {found.before.content_hash[:_SHORT]} ({found.before.num_rows:,} rows)"
        f" to {found.after.content_hash[:_SHORT]} ({found.after.num_rows:,} rows)"
    )
    state.print_items(
        title,
        found.changes,
        {
            "device": "device",
            "operator": "operator",
            "topology": lambda change: change.topology or "-",
            "added": "num_added",
            "removed": "num_removed",
        },
    )


@snapshots.command()
def release(
    context: typer.Context,
    snapshot: Hash,
    holder: Annotated[str, typer.Argument(help="Who needs it no longer, as `list` shows.")],
) -> None:
    """Take a holder from a snapshot."""
    with open_services(context) as (state, services):
        released = services.catalog.release_snapshot(snapshot, holder)
        _print_snapshots(state, "Snapshot", [released])


@snapshots.command()
def delete(context: typer.Context, snapshot: Hash) -> None:
    """Forget a snapshot that nothing holds. Its rows stay until `catalog prune`."""
    with open_composition(state_of(context)) as services:
        services.catalog.delete_snapshot(snapshot)
        note(f"deleted {snapshot}")


def selection_of(words: Sequence[str] | None) -> MeasurementFilter:
    """Return the filter that `--where` words say.

    Raises:
        InvalidRequestError: a word names no field of the filter, or has a wrong value.

    """
    said = parse_assignments(words or [])
    fields = {
        name: parse_yaml_value(value, name) if name.startswith("include_") else value
        for name, value in said.items()
    }
    return schema.decode(MeasurementFilter, fields, "where")


def _print_snapshots(state: CliState, title: str, snapshots: Sequence[Snapshot]) -> None:
    num_letters = None if state.is_data else _SHORT
    state.print_items(
        title,
        snapshots,
        {
            "snapshot": lambda snapshot: snapshot.content_hash[:num_letters],
            "rows": "num_rows",
            "selection": lambda snapshot: _say_selection(snapshot.selection),
            "created": "created_at",
            "held by": lambda snapshot: ", ".join(snapshot.holders) or "-",
        },
    )


def _say_selection(selection: MeasurementFilter) -> str:
    said = {name: value for name, value in schema.encode(selection).items() if value}
    words = [name if value is True else f"{name}={value}" for name, value in said.items()]
    return ", ".join(words) or "all good rows"


def artifacts(
    context: typer.Context,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="Only these; all kinds where it is left out.")
    ] = "",
) -> None:
    """List the files that the catalog keeps for other services, newest first.

    The predictor keeps its trained models and its corrections there, so that all its replicas share
    them; of a kind one file may be active. Backups bring them along, pruning leaves them.

    Example: `foretoken catalog artifacts latency_models`
    """
    with open_services(context) as (state, services):
        kinds = [kind] if kind else _list_kinds(services.catalog)
        kept = [one for name in kinds for one in services.catalog.list_artifacts(name)]
    num_letters = None if state.is_data else _SHORT
    state.print_items(
        "Artifacts",
        kept,
        {
            "name": "name",
            "kind": "kind",
            "bytes": "num_bytes",
            "created": "created_at",
            "active": "is_active",
            "content": lambda artifact: artifact.content_hash[:num_letters],
        },
    )


def _list_kinds(catalog: CatalogAdminPort) -> list[str]:
    kinds: list[str] = read_table(catalog.query_sql(_KINDS)).column("kind").to_pylist()
    return kinds


# The commands of `foretoken catalog` that stand here.
COMMANDS = (artifacts, sql, check, backup, restore, recover, prune, compact)
