"""What the database may reach: itself, and nothing else of the machine or the network."""

from collections.abc import Sequence

import duckdb

from foretoken.catalog.storage.literal import quote

# DuckLake sets this in its own transactions.
_LAKE_TRANSACTIONS = "current_transaction_invalidation_policy"


def lock_down(connection: duckdb.DuckDBPyConnection, folders: Sequence[str]) -> None:
    """Keep the database from reaching anything but what is attached and these folders.

    Applies to all cursors. Nothing can be set any more.
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
    if _has_setting(connection, _LAKE_TRANSACTIONS):
        settings.append(f"allowed_configs = [{quote(_LAKE_TRANSACTIONS)}]")
    for setting in (*settings, "lock_configuration = true"):
        connection.execute(f"SET {setting}")


def _has_setting(cursor: duckdb.DuckDBPyConnection, name: str) -> bool:
    # Listing all settings takes ten times as long.
    try:
        cursor.execute("SELECT current_setting(?)", [name])
    except duckdb.CatalogException:
        return False
    return True
