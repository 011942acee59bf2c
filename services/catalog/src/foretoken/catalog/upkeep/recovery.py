"""Go on with a catalog that lost a part of what it acknowledged, and record what that was."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.storage.attachment import FileAttachment, read_commit_of
from foretoken.catalog.storage.commit import AcknowledgedFile, Commit, Loss, insert_commit
from foretoken.catalog.storage.database_file import log_of, sync
from foretoken.catalog.storage.error import translate
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import CorruptCatalogError, ForetokenError, InvalidRequestError

_LOG_DAMAGE = "replaying wal"
# Where DuckDB says the first entry is whose checksum is wrong; all before it is sound.
_DAMAGED_ENTRY = re.compile(r"entry at byte position (\d+)")


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was wrong, in words, and where the damaged log was kept; both empty when nothing was."""

    description: str = ""
    kept_log: Path | None = None


@dataclass(frozen=True, slots=True)
class _Findings:
    """What is missing and what is damaged; `sound_log` is what a damaged log has before that."""

    loss: Loss | None
    sound_log: bytes | None
    damaged_note: CorruptCatalogError | None

    def describe(self, path: Path) -> str:
        parts = []
        if self.loss is not None:
            parts.append(self.loss.describe())
        if self.sound_log is not None:
            log = log_of(path)
            parts.append(
                f"the log {log.name} is damaged after {len(self.sound_log):,} of its "
                f"{log.stat().st_size:,} bytes"
            )
        if self.damaged_note is not None:
            parts.append(self.damaged_note.message)
        return "; ".join(parts)

    def as_error(self, path: Path) -> CorruptCatalogError:
        if self.loss is not None:
            return self.loss.as_error()
        return CorruptCatalogError(
            f"{self.describe(path)}. To go on with what there is: foretoken catalog recover "
            "--accept-loss"
        )


def recover_catalog(path: Path, now: datetime, *, is_accepting_loss: bool) -> Recovery:
    """Look for what a catalog lacks; if that is accepted, let it be opened as it is.

    Of a damaged log all before the damage is used, and the whole is kept with `.damaged` after its
    name. What is missing is recorded in the catalog's table of losses. `now` is in UTC.

    Raises:
        IncompleteCatalogError, CorruptCatalogError: something is wrong, and was not accepted.
        CatalogBusyError: a process has the catalog open.
        InvalidRequestError: a damaged log of an earlier time is in the way.

    """
    path = path.absolute()
    found = _examine(path)
    description = found.describe(path)
    if not description:
        return Recovery()
    if not is_accepting_loss:
        raise found.as_error(path)
    kept_log = None if found.sound_log is None else _cut_log(path, found.sound_log)
    store = Store(CatalogConfig(path=str(path)), FileAttachment(path, is_accepting_loss=True))
    store.open()
    try:
        with store.transaction() as cursor:
            if found.loss is not None:
                _record(cursor, found.loss, now)
    finally:
        store.close()
    return Recovery(description, kept_log)


def _examine(path: Path) -> _Findings:
    damaged_note, note = None, None
    try:
        note = AcknowledgedFile(path).read()
    except CorruptCatalogError as err:
        damaged_note = err
    newest, sound_log = _read_sound_part(path)
    loss = None
    if note is not None and newest.number < note.commit.number:
        loss = Loss(path, note, newest)
    return _Findings(loss, sound_log, damaged_note)


def _read_sound_part(path: Path) -> tuple[Commit, bytes | None]:
    """Return the newest commit that can be read, and the sound part of the log if it is damaged."""
    try:
        with _connected(path) as connection:
            return read_commit_of(connection, path), None
    except CorruptCatalogError as err:
        if _LOG_DAMAGE not in err.message.lower():
            raise
        log, damage = log_of(path).read_bytes(), err
    with TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.look") as folder:
        link = Path(folder) / path.name
        link.hardlink_to(path)
        while log:
            entry = _DAMAGED_ENTRY.search(damage.message)
            log = log[: int(entry[1])] if entry and int(entry[1]) < len(log) else b""
            log_of(link).write_bytes(log)
            try:
                with _connected(link) as connection:
                    return read_commit_of(connection, link), log
            except CorruptCatalogError as err:
                damage = err
    raise damage


@contextmanager
def _connected(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:") as connection:
        try:
            yield connection
        except duckdb.Error as err:
            raise translate(err, str(path)) from err


def _cut_log(path: Path, sound: bytes) -> Path:
    """Put the sound part of a log in its place; return where the whole is kept."""
    log = log_of(path)
    kept, fresh = (log.with_name(log.name + end) for end in (".damaged", ".new"))
    if kept.exists():
        raise InvalidRequestError.of_field("path", f"{kept} is in the way; move it elsewhere")
    try:
        fresh.write_bytes(sound)
        sync(fresh)
        shutil.copyfile(log, kept)
        sync(kept)
        fresh.replace(log)
        sync(path.parent)
    except OSError as err:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise ForetokenError(f"{err.filename}: {err.strerror}") from err
    return kept


def _record(cursor: duckdb.DuckDBPyConnection, loss: Loss, now: datetime) -> None:
    """Write what is given up, and never give its numbers to other commits."""
    lost = loss.note.commit
    insert_commit(cursor, replace(loss.found, number=lost.number))
    cursor.execute(
        "INSERT INTO accepted_loss VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            loss.found.number + 1,
            lost.number,
            loss.num_batches,
            loss.num_rows,
            lost.newest_batch,
            lost.recorded_at,
            now.replace(tzinfo=None),
        ],
    )
