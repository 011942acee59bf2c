"""What DuckDB's errors mean for a caller of the catalog."""

import re

import duckdb

from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
    StorageFullError,
)

# What DuckDB's messages say (in lower case), and what that means for the caller.
_MEANINGS: tuple[tuple[tuple[str, ...], type[ForetokenError], str], ...] = (
    (
        ("set lock on file", "already attached", "already open", "file handle conflict"),
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
        "has a damaged log; restore it from a backup, or move the .wal file away and lose its rows",
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
    (("out of memory",), CatalogBusyError, "has no memory left; raise memory_limit"),
)
_DAMAGE = (
    duckdb.IOException,
    duckdb.SerializationException,
    duckdb.InternalException,
    duckdb.FatalException,
    duckdb.CatalogException,
)
_HOLDER = re.compile(r"\(pid (\d+)\)")


def translate(error: duckdb.Error, name: str) -> ForetokenError:
    """Return the error a caller can act on for what DuckDB says of the catalog of that name."""
    text = str(error).lower()
    holder = _HOLDER.search(text)
    for phrases, kind, meaning in _MEANINGS:
        if any(phrase in text for phrase in phrases):
            details = {"pid": holder[1]} if holder else {}
            return kind(f"the catalog {name} {meaning}: {error}", **details)
    if isinstance(error, _DAMAGE):
        return CorruptCatalogError(
            f"{name} cannot be read as a catalog; restore it from a backup: {error}"
        )
    return ForetokenError(f"the catalog {name} failed: {error}")


def is_invalidated(error: duckdb.Error) -> bool:
    """Return whether the database must be attached anew before it can be used again.

    DuckDB gives a database up when a checkpoint fails, even where the commit before it is on disk.
    """
    text = str(error).lower()
    return "invalidated" in text or "detach and reattach" in text
