"""DuckDB's extensions, from Python packages: clusters often reach no extension server."""

from importlib.util import find_spec
from pathlib import Path

import duckdb

from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import InvalidRequestError


def load_extension(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Load an extension of DuckDB, which checks that it was signed by its makers.

    Raises:
        InvalidRequestError: there is none for this version of DuckDB.

    """
    try:
        connection.execute(f"LOAD {quote(_packaged_file(name) or name)}")
    except duckdb.Error as err:
        raise InvalidRequestError.of_field(
            "lake",
            f"DuckDB {duckdb.__version__} has no extension {name} here; "
            "pip install 'foretoken[lake]' brings both in versions that fit",
        ) from err


def _packaged_file(name: str) -> str | None:
    """Return the file of a package made for exactly this DuckDB."""
    package = find_spec(f"duckdb_extension_{name}")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    file = f"extensions/v{duckdb.__version__}/{name}.duckdb_extension"
    return next((str(Path(f) / file) for f in folders if (Path(f) / file).exists()), None)
