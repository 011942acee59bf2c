"""Write transactions, numbered; the newest acknowledged one, and what is lost without it.

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

import duckdb

from foretoken.catalog.storage import database_file
from foretoken.catalog.storage.database_file import note_of, refused_by_disk, sync
from foretoken.domain.errors import CorruptCatalogError, IncompleteCatalogError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a transaction records; `newest_batch` and `recorded_at` (ISO 8601, UTC) of its last."""

    num_batches: int = 0
    num_rows: int = 0
    newest_batch: str = ""
    recorded_at: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A write transaction: its number, and what was recorded up to it.

    Counts never fall, whatever is pruned: two commits differ by what was recorded between them.
    They leave out what an older Foretoken had pruned. The newest batch is described in words.
    """

    number: int = 0
    num_batches: int = 0
    num_rows: int = 0
    newest_batch: str = ""
    recorded_at: str = ""

    def followed_by(self, recorded: Recorded) -> "Commit":
        """Return the next commit."""
        return Commit(
            number=self.number + 1,
            num_batches=self.num_batches + recorded.num_batches,
            num_rows=self.num_rows + recorded.num_rows,
            newest_batch=recorded.newest_batch or self.newest_batch,
            recorded_at=recorded.recorded_at or self.recorded_at,
        )


def insert_commit(cursor: duckdb.DuckDBPyConnection, commit: Commit) -> None:
    """Write a commit, as part of its own transaction."""
    cursor.execute(
        "INSERT INTO write_commit VALUES (?, ?, ?, ?, ?)",
        [
            commit.number,
            commit.num_batches,
            commit.num_rows,
            commit.newest_batch,
            commit.recorded_at,
        ],
    )


def read_newest_commit(cursor: duckdb.DuckDBPyConnection, database: str = "store") -> Commit:
    """Return the newest commit of an attached catalog; the zeroth where none is numbered yet."""
    tables = cursor.execute(
        "SELECT count(*) FROM duckdb_tables()"
        " WHERE database_name = ? AND table_name = 'write_commit'",
        [database],
    ).fetchall()
    if tables == [(0,)]:
        return Commit()
    rows = cursor.execute(
        "SELECT commit_number, num_batches, num_rows, newest_batch, recorded_at"  # noqa: S608 - a name of ours
        f" FROM {database}.write_commit ORDER BY commit_number DESC LIMIT 1"
    ).fetchall()
    if not rows:
        return Commit()
    number, num_batches, num_rows, newest_batch, recorded_at = rows[0]
    return Commit(
        number=number,
        num_batches=num_batches,
        num_rows=num_rows,
        newest_batch=newest_batch,
        recorded_at=recorded_at,
    )


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


@dataclass(frozen=True, slots=True)
class Loss:
    """The note says that `note.commit` was acknowledged; the newest that is there is `found`."""

    path: Path
    note: Note
    found: Commit

    @property
    def num_commits(self) -> int:
        """How many write transactions are missing."""
        return self.note.commit.number - self.found.number

    @property
    def num_batches(self) -> int:
        """How many batches of measurements are missing."""
        return self.note.commit.num_batches - self.found.num_batches

    @property
    def num_rows(self) -> int:
        """How many rows are missing."""
        return self.note.commit.num_rows - self.found.num_rows

    def describe(self) -> str:
        """Say what is missing, and of which file."""
        return (
            f"the catalog {self.path} lacks {_count(self.num_rows, 'row')} in "
            f"{_count(self.num_batches, 'batch', 'batches')} that it acknowledged "
            f"({_count(self.num_commits, 'write')}): acknowledged up to "
            f"{_name(self.note.commit)}, found up to {_name(self.found)}; {self._describe_files()}"
        )

    def as_error(self) -> IncompleteCatalogError:
        """Return the error to refuse the catalog with."""
        return IncompleteCatalogError(
            f"{self.describe()}. Put the missing file back, or restore a backup (foretoken catalog "
            "restore --replace), or go on without what is missing: foretoken catalog recover "
            "--accept-loss",
            num_missing_rows=str(self.num_rows),
            num_missing_batches=str(self.num_batches),
            num_missing_writes=str(self.num_commits),
        )

    def _describe_files(self) -> str:
        if not self.path.exists():
            return "the file is gone"
        log = database_file.log_of(self.path)
        had, has = self.note.log_bytes, database_file.log_bytes(self.path)
        now = f"has {has:,}" if log.exists() else "is gone"
        return (
            f"its log {log.name} had {had:,} bytes then and {now} now: the log was lost or "
            f"damaged, or {self.path.name} is an older copy"
        )


def _name(commit: Commit) -> str:
    if not commit.newest_batch:
        return f"{commit.recorded_at} (write {commit.number})" if commit.recorded_at else "nothing"
    return f"{commit.newest_batch}, recorded {commit.recorded_at} (write {commit.number})"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
