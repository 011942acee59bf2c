"""The views that questions in SQL are asked of: stable names, whatever the tables are."""

import hashlib
from collections.abc import Iterable, Mapping

import duckdb

from foretoken.catalog.dims import DIM_COLUMNS
from foretoken.catalog.storage.literal import quote
from foretoken.domain.operators.spec.operator import OperatorSpec, all_operators

# What the views name otherwise, or what is no matter of theirs.
_INNER = ", ".join(("operator", "batch_number", *DIM_COLUMNS))


def describe_views() -> Mapping[str, str]:
    """Return the names of the public views, each with what is in it."""
    operators = {f"op_{spec.name}": spec.summary for spec in all_operators().values()}
    return {
        "measurements": "all operators together; dims is a map: dims['m']",
        "runs": "profiling sessions and imports",
        "snapshots": "stored snapshots, and who needs them",
        "artifacts": "files kept for other services, such as trained models; not their content",
        "losses": "what was acknowledged, was lost, and was gone on without",
        **operators,
    }


def create_public_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Make the public views that are missing, or do not fit the operators there are.

    The others are left as they are: in a lake every change is one more version of it.
    """
    rows = connection.execute(
        "SELECT view_name, comment FROM duckdb_views() WHERE database_name = 'store'"
    ).fetchall()
    present = dict(rows)
    summaries = describe_views()
    connection.begin()
    for name, query in _queries().items():
        comment = f"{summaries[name]} ({hashlib.sha256(query.encode()).hexdigest()[:8]})"
        if present.get(name) != comment:
            connection.execute(f'CREATE OR REPLACE VIEW "{name}" AS {query}')
            connection.execute(f'COMMENT ON VIEW "{name}" IS {quote(comment)}')
    connection.commit()


def _queries() -> dict[str, str]:
    operators = all_operators().values()
    return {
        "measurements": _all_measurements(operators),
        "runs": "SELECT * EXCLUDE (completed_by) FROM run_state",
        "snapshots": _SNAPSHOTS,
        "artifacts": _ARTIFACTS,
        "losses": "SELECT * FROM accepted_loss",
        **{f"op_{spec.name}": _measurements_of(spec) for spec in operators},
    }


_SNAPSHOTS = """
    SELECT * EXCLUDE (as_of), coalesce(
        (SELECT list(holder ORDER BY held_at, holder) FROM snapshot_holder
         WHERE snapshot_holder.content_hash = snapshot.content_hash), []) AS holders
    FROM snapshot
"""


_ARTIFACTS = """
    SELECT * REPLACE (TRY_CAST(created_at AS TIMESTAMP) AS created_at) FROM artifact
"""


def _all_measurements(operators: Iterable[OperatorSpec]) -> str:
    cases = " ".join(f"WHEN '{spec.name}' THEN MAP {{{_pairs(spec)}}}" for spec in operators)
    return (
        f"SELECT operator, CASE operator {cases} END AS dims, "  # noqa: S608 - names from our own files
        f"* EXCLUDE ({_INNER}) FROM readable_measurement"
    )


def _pairs(spec: OperatorSpec) -> str:
    return ", ".join(f"'{name}': d{place}" for place, name in enumerate(spec.dim_names))


def _measurements_of(spec: OperatorSpec) -> str:
    columns = ", ".join(f'd{place} AS "{name}"' for place, name in enumerate(spec.dim_names))
    return (
        f"SELECT {columns}, * EXCLUDE ({_INNER}) "  # noqa: S608 - names from our own files
        f"FROM readable_measurement WHERE operator = '{spec.name}'"
    )
