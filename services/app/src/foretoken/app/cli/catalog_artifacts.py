"""`foretoken catalog artifacts`: the files that the catalog keeps for other services."""

from typing import Annotated

import typer

from foretoken.app.cli.state import open_composition, state_of
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire.arrow import read_table

_KINDS = SqlQuery(text="SELECT DISTINCT kind FROM artifacts ORDER BY kind")
# As many digits of a hash as people compare.
_SHORT = 12


def list_artifacts(
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
    state = state_of(context)
    with open_composition(state) as services:
        kinds = [kind] if kind else _list_kinds(services.catalog)
        kept = [one for name in kinds for one in services.catalog.list_artifacts(name)]
    rows = [
        (
            artifact.name,
            artifact.kind,
            artifact.num_bytes,
            artifact.created_at,
            artifact.is_active,
            artifact.content_hash if state.is_json else artifact.content_hash[:_SHORT],
        )
        for artifact in kept
    ]
    columns = ("name", "kind", "bytes", "created", "active", "content")
    state.print_rows("Artifacts", columns, rows)


def _list_kinds(catalog: CatalogAdminPort) -> list[str]:
    kinds: list[str] = read_table(catalog.query_sql(_KINDS)).column("kind").to_pylist()
    return kinds
