"""What the database may reach: itself, and nothing else of the machine or the network."""

from collections.abc import Sequence

import duckdb

from foretoken.catalog.storage.literal import quote

# How much memory one cursor may take for sorts and hash tables; DuckDB 1.5 has no such setting.
_CURSOR_MEMORY = "operator_memory_limit"
# DuckLake sets this in its own transactions.
_LAKE_TRANSACTIONS = "current_transaction_invalidation_policy"


def lock_down(connection: duckdb.DuckDBPyConnection, folders: Sequence[str]) -> None:
    """Keep the database from reaching anything but what is attached and these folders.

    Applies to all cursors. Nothing can be set any more, but `limit_cursor_memory` works.
    """
    allowed = ", ".join(quote(folder.rstrip("/") + "/") for folder in folders)
    settings = [
        # Variables of this process are no tables.
        "python_enable_replacements = false",
        "autoload_known_extensions = false",
        "autoinstall_known_extensions = false",
        "allow_community_extensions = false",
        f"allowed_directories = [{allowed}]",
        "enable_external_access = false",
    ]
    names = [n for n in (_CURSOR_MEMORY, _LAKE_TRANSACTIONS) if _has_setting(connection, n)]
    settings.append(f"allowed_configs = [{', '.join(quote(name) for name in names)}]")
    for setting in (*settings, "lock_configuration = true"):
        connection.execute(f"SET {setting}")


def limit_cursor_memory(cursor: duckdb.DuckDBPyConnection, num_bytes: int) -> None:
    """Let sorts and hash tables of this cursor go to disk above so many bytes, where DuckDB can."""
    if _has_setting(cursor, _CURSOR_MEMORY):
        cursor.execute(f"SET {_CURSOR_MEMORY} = '{num_bytes} bytes'")


def _has_setting(cursor: duckdb.DuckDBPyConnection, name: str) -> bool:
    query = "SELECT count(*) FROM duckdb_settings() WHERE name = ?"
    return cursor.execute(query, [name]).fetchall() == [(1,)]
