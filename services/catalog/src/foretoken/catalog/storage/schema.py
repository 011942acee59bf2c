"""The catalog's tables, made by numbered scripts, and the views questions in SQL are asked of."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files

import duckdb

from foretoken.catalog.dims import DIM_COLUMNS, MAX_DIMS
from foretoken.catalog.storage.attachment import Attachment
from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import CorruptCatalogError, InvalidRequestError
from foretoken.domain.operators.spec.operator import OperatorSpec, all_operators

_TABLE_KEY = re.compile(r",\s*PRIMARY KEY \([^)]*\)")
_COLUMN_KEY = re.compile(r"\bPRIMARY KEY\b")


def migrate(connection: duckdb.DuckDBPyConnection, attachment: Attachment, *, is_new: bool) -> None:
    """Run the scripts that the attached database has not seen, all or none.

    Raises:
        CorruptCatalogError: it is no catalog, or one of a newer Foretoken.

    """
    name = attachment.name
    # SHOW TABLES takes ten times as long: it looks at the columns of every view.
    listed = "SELECT table_name FROM duckdb_tables() WHERE database_name = 'store'"
    tables = {table for (table,) in connection.execute(listed).fetchall()}
    if "schema_version" not in tables and (tables or not is_new):
        raise CorruptCatalogError(f"{name} is a database but not a catalog")
    connection.begin()
    connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER, name VARCHAR)")
    applied = {
        version
        for (version,) in connection.execute("SELECT version FROM schema_version").fetchall()
    }
    scripts = _read_scripts()
    if applied - scripts.keys():
        connection.rollback()
        raise CorruptCatalogError(
            f"{name} has schema version {max(applied)}, this Foretoken knows {max(scripts)}: "
            "use a newer Foretoken"
        )
    for version, (title, script) in sorted(scripts.items()):
        if version not in applied:
            connection.execute(
                script if attachment.supports_primary_keys else _without_keys(script)
            )
            connection.execute("INSERT INTO schema_version VALUES (?, ?)", [version, title])
    connection.commit()


def check_operators(operators: Iterable[OperatorSpec]) -> None:
    """Check that the table has a column for every dimension of the operators.

    Raises:
        InvalidRequestError: an operator, of a plug-in perhaps, has too many.

    """
    for spec in operators:
        if len(spec.dims) > MAX_DIMS:
            raise InvalidRequestError.of_field(
                f"operator {spec.name}",
                f"has {len(spec.dims)} dimensions, the catalog keeps {MAX_DIMS}; put what does not "
                "change the work into the variant",
            )


def _read_scripts() -> dict[int, tuple[str, str]]:
    folder = files("foretoken.catalog").joinpath("migrations")
    scripts = [entry for entry in folder.iterdir() if entry.name.endswith(".sql")]
    return {
        int(entry.name[:4]): (entry.name.removesuffix(".sql"), entry.read_text(encoding="utf-8"))
        for entry in scripts
    }


def _without_keys(script: str) -> str:
    return _COLUMN_KEY.sub("NOT NULL", _TABLE_KEY.sub("", script))


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
