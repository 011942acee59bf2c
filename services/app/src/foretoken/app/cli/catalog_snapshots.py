"""`foretoken catalog snapshots`: versions of the data, named by their content."""

from collections.abc import Sequence
from typing import Annotated

import typer

from foretoken.app.cli.state import (
    CliState,
    note,
    open_composition,
    parse_assignments,
    state_of,
)
from foretoken.domain import schema
from foretoken.domain.measurements.measurement import MeasurementFilter, Snapshot
from foretoken.domain.plugins import parse_yaml_value

app = typer.Typer(
    help="Versions of the data: immutable, named by a hash of their content.", no_args_is_help=True
)

Hash = Annotated[str, typer.Argument(metavar="HASH", help="Its content hash, or the beginning.")]

Where = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these: `device=a30`, `operator=gemm`, `model=llama-3.1-8b`, `framework='vllm"
        " 0.19'`, `topology=`, `run_id=`, `snapshot=`; `include_flagged=true` and"
        " `include_failed=true` take doubtful and failed rows too. Repeatable."
    ),
]

# As many digits of a hash as people compare.
_SHORT = 12


@app.command("list")
def list_snapshots(context: typer.Context) -> None:
    """List the stored snapshots, newest first."""
    state = state_of(context)
    with open_composition(state) as services:
        _print_snapshots(state, "Snapshots", services.catalog.list_snapshots())


@app.command()
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
    state = state_of(context)
    with open_composition(state) as services:
        snapshot = services.catalog.create_snapshot(selection_of(where), holder)
        _print_snapshots(state, "Snapshot", [snapshot])


@app.command()
def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="Hash of the earlier one.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Hash of the later one.")],
) -> None:
    """Show where the rows of two snapshots differ."""
    state = state_of(context)
    with open_composition(state) as services:
        found = services.catalog.diff_snapshots(before, after)
    rows = [
        (
            change.device,
            change.operator,
            change.topology or "-",
            change.num_added,
            change.num_removed,
        )
        for change in found.changes
    ]
    title = (
        f"From {found.before.content_hash[:_SHORT]} ({found.before.num_rows:,} rows)"
        f" to {found.after.content_hash[:_SHORT]} ({found.after.num_rows:,} rows)"
    )
    state.print_rows(title, ("device", "operator", "topology", "added", "removed"), rows)


@app.command()
def release(
    context: typer.Context,
    snapshot: Hash,
    holder: Annotated[str, typer.Argument(help="Who needs it no longer, as `list` shows.")],
) -> None:
    """Take a holder from a snapshot."""
    state = state_of(context)
    with open_composition(state) as services:
        released = services.catalog.release_snapshot(snapshot, holder)
        _print_snapshots(state, "Snapshot", [released])


@app.command()
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
    rows = [
        (
            snapshot.content_hash if state.is_json else snapshot.content_hash[:_SHORT],
            snapshot.num_rows,
            _say_selection(snapshot.selection),
            snapshot.created_at,
            ", ".join(snapshot.holders) or "-",
        )
        for snapshot in snapshots
    ]
    state.print_rows(title, ("snapshot", "rows", "selection", "created", "held by"), rows)


def _say_selection(selection: MeasurementFilter) -> str:
    said = {name: value for name, value in schema.encode(selection).items() if value}
    words = [name if value is True else f"{name}={value}" for name, value in said.items()]
    return ", ".join(words) or "all good rows"
