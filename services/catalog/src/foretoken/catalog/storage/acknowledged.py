"""The newest acknowledged commit, noted in a file next to the database.

DuckDB takes a log that ends early for one whose writer was killed, and opens without the rest. The
note tells the two apart: it is written after its commit is on disk and before anybody has a receipt
for it, so a killed process leaves a note of this commit or of the one before, never of a later one.

The file has two places of a fixed size, written in turn, so that one of them is whole whenever the
power fails, and writing costs one wait for the disk.
"""

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from foretoken.catalog.storage.commit import Commit
from foretoken.catalog.storage.database_file import note_of, refused_by_disk, sync
from foretoken.domain.errors import CorruptCatalogError

_PLACE_BYTES = 1024
# A place fits the commit whatever run it is of: JSON takes up to six bytes for an ASCII character.
_MAX_NAME_CHARS = 120
_sync_content = getattr(os, "fdatasync", os.fsync)  # macOS has the second alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """An acknowledged commit, and the size of the log then, in bytes."""

    commit: Commit
    log_bytes: int = 0


class AcknowledgedFile:
    """Keeps the note of one database. One thread uses it at a time."""

    def __init__(self, database: Path) -> None:
        """Keep where it is."""
        self._path = note_of(database)
        self._descriptor: int | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def read(self) -> Note | None:
        """Return the newest note; None where there is no file.

        Raises:
            CorruptCatalogError: there is one, and no note in it is whole.

        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        places = (content[:_PLACE_BYTES], content[_PLACE_BYTES : 2 * _PLACE_BYTES])
        notes = [note for note in map(_parse, places) if note is not None]
        if not notes:
            raise CorruptCatalogError(
                f"{self._path} is damaged, so nothing says whether its catalog holds all "
                "it acknowledged; restore a backup, or look at what there is and go on with it: "
                "foretoken catalog recover"
            )
        return max(notes, key=lambda note: note.commit.number)

    def write(self, note: Note) -> None:
        """Bring a note to the disk; the file is made anew the first time.

        Raises:
            StorageFullError, CatalogBusyError: the disk does not take it.

        """
        place = _format(note)
        try:
            if self._descriptor is None:
                self._descriptor = self._make(place)
            else:
                os.pwrite(self._descriptor, place, note.commit.number % 2 * _PLACE_BYTES)
                _sync_content(self._descriptor)
        except OSError as err:
            raise refused_by_disk(self._path, err) from err

    def close(self) -> None:
        """Close the file; harmless when it is not open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _make(self, place: bytes) -> int:
        """Put a file with one note, in both places, where the old one is, and leave it open."""
        fresh = self._path.with_name(self._path.name + ".new")
        with contextlib.ExitStack() as undo:
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            undo.callback(os.close, descriptor)
            os.write(descriptor, place * 2)
            os.fsync(descriptor)
            fresh.replace(self._path)
            sync(self._path.parent)
            undo.pop_all()
        return descriptor


def _format(note: Note) -> bytes:
    name = note.commit.newest_batch.encode("ascii", "replace").decode()[:_MAX_NAME_CHARS]
    content = {**asdict(note.commit), "newest_batch": name, "log_bytes": note.log_bytes}
    text = json.dumps(content)
    return f"{zlib.crc32(text.encode()):08x} {text}".ljust(_PLACE_BYTES - 1).encode() + b"\n"


def _parse(place: bytes) -> Note | None:
    """Return the note of a place that was written whole."""
    checksum, _, text = place.strip().partition(b" ")
    if checksum != f"{zlib.crc32(text):08x}".encode():
        return None
    content = json.loads(text)
    commit = Commit(**{field.name: content[field.name] for field in fields(Commit)})
    return Note(commit=commit, log_bytes=content["log_bytes"])
