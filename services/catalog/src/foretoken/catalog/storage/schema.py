"""The catalog's tables: made by numbered scripts."""

import re
from collections.abc import Iterable
from importlib.resources import files

import duckdb

from foretoken.catalog.dims import MAX_DIMS
from foretoken.catalog.storage.attachment import Attachment
from foretoken.domain.errors import CorruptCatalogError, InvalidRequestError
from foretoken.domain.operators.spec.operator import OperatorSpec

_TABLE_KEY = re.compile(r",\s*PRIMARY KEY \([^)]*\)")
_COLUMN_KEY = re.compile(r"\bPRIMARY KEY\b")


def migrate(connection: duckdb.DuckDBPyConnection, attachment: Attachment, *, is_new: bool) -> None:
    """Run the scripts that the attached database has not seen, all or none.

    Raises:
        CorruptCatalogError: it is no catalog, or one of a newer Foretoken.

    """
    name = attachment.name
    tables = {table for (table,) in connection.execute("SHOW TABLES").fetchall()}
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
