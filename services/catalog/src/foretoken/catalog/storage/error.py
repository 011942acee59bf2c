"""What DuckDB's errors mean for a caller of the catalog."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
    StorageFullError,
)

# What messages say (in lower case), and what that means for the caller.
Meanings = tuple[tuple[tuple[str, ...], type[ForetokenError], str], ...]

_MEANINGS: Meanings = (
    (
        ("already attached", "already open", "file handle conflict"),
        CatalogBusyError,
        "is open in this process already; close it there, and let go of rows half read",
    ),
    (
        ("set lock on file",),
        CatalogBusyError,
        "is open in another process; stop it, or talk to it over gRPC",
    ),
    (
        ("no space left", "file too large", "quota exceeded"),
        StorageFullError,
        "has no room on its disk; make room and send again what has no receipt",
    ),
    (
        ("replaying wal", "corrupt wal"),
        CorruptCatalogError,
        (
            "has a damaged log; restore it from a backup, or keep what is before the damage: "
            "foretoken catalog recover --accept-loss"
        ),
    ),
    (
        ("corrupt database", "checksum", "could not read enough bytes"),
        CorruptCatalogError,
        "is damaged; restore it from a backup",
    ),
    (
        ("cannot open file", "is a directory", "permission denied", "read-only file system"),
        InvalidRequestError,
        "cannot be opened; name a file that can be written",
    ),
    (
        ("input/output error", "could not write"),
        CatalogBusyError,
        "cannot write to its disk; look at the disk and try again",
    ),
    (
        ("storage version",),
        CorruptCatalogError,
        "is a database of a newer format, not a catalog of this program",
    ),
    (
        ("interrupt error",),
        CatalogBusyError,
        "was closed while it was read; open it and ask again",
    ),
    # A commit that finds none names only the setting.
    (
        ("out of memory", "set memory_limit"),
        CatalogBusyError,
        "has no memory left; raise memory_limit",
    ),
)
_DAMAGE = (
    duckdb.IOException,
    duckdb.SerializationException,
    duckdb.InternalException,
    duckdb.FatalException,
    duckdb.CatalogException,
)
_HOLDER = re.compile(r"\(pid (\d+)\)")
# What DuckDB's errors begin with; those of a stream of Arrow data arrive as their text alone.
_KIND = re.compile(r"[A-Z][A-Za-z ]* Error: ")


def translate(error: duckdb.Error, name: str) -> ForetokenError:
    """Return the error a caller can act on for what DuckDB says of the catalog of that name."""
    explained = explain(str(error), name, _MEANINGS)
    if explained is not None:
        return explained
    if isinstance(error, _DAMAGE):
        return CorruptCatalogError(
            f"{name} cannot be read as a catalog; restore it from a backup: {error}"
        )
    return ForetokenError(f"the catalog {name} failed: {error}")


@contextmanager
def translated(explain_error: Callable[[duckdb.Error], ForetokenError]) -> Iterator[None]:
    """Raise what `explain_error` makes of DuckDB's errors, also of those out of Arrow's streams."""
    try:
        yield
    except duckdb.Error as err:
        raise explain_error(err) from err
    except (OSError, pa.ArrowException) as err:
        text = str(err)
        if not _KIND.match(text):
            raise
        raise explain_error(duckdb.Error(text)) from err


def explain(text: str, name: str, meanings: Meanings) -> ForetokenError | None:
    """Return the error for what a message says of the catalog of that name, if it is known."""
    said = text.lower()
    holder = _HOLDER.search(said)
    details = {"pid": holder[1]} if holder else {}
    return next(
        (
            kind(f"the catalog {name} {meaning}: {text}", **details)
            for phrases, kind, meaning in meanings
            if any(phrase in said for phrase in phrases)
        ),
        None,
    )


def is_invalidated(error: duckdb.Error) -> bool:
    """Return whether the database must be attached anew before it can be used again.

    DuckDB gives a database up when a checkpoint fails, even where the commit before it is on disk.
    """
    text = str(error).lower()
    return "invalidated" in text or "detach and reattach" in text
