"""A consistent copy of the catalog in a file of its own, made while it is read and written."""

import contextlib
import uuid
from pathlib import Path

import duckdb

from foretoken.catalog.storage.database_file import attach_file, delete_file
from foretoken.catalog.storage.error import translate
from foretoken.catalog.storage.store import COPY_PREFIX, Store
from foretoken.domain.errors import InvalidRequestError


def copy_catalog(store: Store) -> Path:
    """Write all that is committed to a new file in the scratch folder, rows in their order.

    Deleted rows leave no room in it. Whoever calls this deletes it; the next opening does else.

    Raises:
        StorageFullError: there is no room for a copy.

    """
    name = f"{COPY_PREFIX}{uuid.uuid4().hex}"
    path = store.scratch_folder / f"{name}.duckdb"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise InvalidRequestError.of_field("path", f"{path.parent}: {err.strerror}") from err
    with contextlib.ExitStack() as undo, store.cursor() as cursor:
        undo.callback(delete_file, path)
        try:
            _copy(cursor, path, name)
        except duckdb.Error as err:
            # Whatever is wrong is wrong with the catalog, or with the disk both are on.
            raise translate(err, store.attachment.name) from err
        undo.pop_all()
    return path


def _copy(cursor: duckdb.DuckDBPyConnection, path: Path, name: str) -> None:
    attach_file(cursor, path, name)
    try:
        # One transaction: all tables as they were at one moment.
        cursor.begin()
        cursor.execute(f"COPY FROM DATABASE store TO {name}")
        cursor.commit()
        cursor.execute(f"CHECKPOINT {name}")  # all in the file, none in its log
    except duckdb.Error:
        with contextlib.suppress(duckdb.Error):
            cursor.rollback()
        raise
    finally:
        cursor.execute(f"DETACH {name}")
