"""The catalog's database: one process owns it, its threads share it through cursors."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.storage.attachment import Attachment, FileAttachment
from foretoken.catalog.storage.commit import Recorded
from foretoken.catalog.storage.error import is_invalidated, translate, translated
from foretoken.catalog.storage.lake import LakeAttachment
from foretoken.catalog.storage.literal import quote
from foretoken.catalog.storage.lockdown import lock_down
from foretoken.catalog.storage.schema import check_operators, create_public_views, migrate
from foretoken.domain.errors import CatalogBusyError, ForetokenError
from foretoken.domain.operators.spec.operator import all_operators


class RegularWork:
    """Calls a function every so often, from `start` to `stop`."""

    def __init__(self, name: str, interval_s: float, work: Callable[[], None]) -> None:
        """Keep what to do; `name` is what the thread is called."""
        self._name = name
        self._interval_s = interval_s
        self._work = work
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the first call comes after one interval."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a call that runs, and make no more; harmless when nothing was begun."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._work()


class Usage:
    """Counts users. Safe to use from several threads."""

    def __init__(self) -> None:
        """Begin with none."""
        self._changed = threading.Condition()
        self._num_users = 0

    @property
    def num_users(self) -> int:
        """How many there are now."""
        return self._num_users

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Be a user until the end; waits while `idle` lasts."""
        with self._changed:
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def idle(self, wait_s: float) -> Iterator[bool]:
        """Wait for a moment without users and keep it so; false when there was none in time.

        New users come in until that moment: one that waits for another must not wait for this.
        """
        with self._changed:
            yield self._changed.wait_for(lambda: not self._num_users, wait_s)


# What files of copies in the scratch folder are called; only a crash leaves one there.
COPY_PREFIX = "copy_"
# DuckDB looks whether it is interrupted thousands of times a second.
_CLOSING_WAIT_S = 10.0
_CLOSING_TICK_S = 0.05
# Of the size at which a log is merged: a process that reads the file takes the log up row by row,
# an eighth of a second of the second that a whole one takes.
_LOG_RATIO_TO_READ = 0.125
# Longer than most questions take.
_OUTSIDE_WAIT_S = 60.0

_log = logging.getLogger(__name__)


class Store:
    """Opens the database, brings its schema up to date, and lets threads read and write it."""

    def __init__(self, config: CatalogConfig, attachment: Attachment | None = None) -> None:
        """Keep the configuration, and where the tables lie if not in its file."""
        self._config = config
        self._attachment = attachment or attachment_of(config)
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._write_lock = threading.RLock()
        self._rewriting_lock = threading.Lock()
        self._opening_lock = threading.Lock()  # a connection being closed gives no cursor
        self._usage = Usage()
        self._outside = Usage()  # other processes that read the file
        self._cursors: set[duckdb.DuckDBPyConnection] = set()
        self._is_invalidated = False
        self._num_writes = 0
        self._num_layouts = 0
        self._recorded = Recorded()
        self._log_merging = RegularWork("merge-log", config.max_log_age_s, self.merge_log)

    def open(self) -> None:
        """Open the database, or make it.

        Raises:
            CatalogBusyError: another process, or another catalog of this one, has it open.
            IncompleteCatalogError: it lacks what was acknowledged.
            CorruptCatalogError: it is not a catalog, is damaged, or is of a newer Foretoken.
            InvalidRequestError: the path cannot be a file, or an operator does not fit the table.
            StorageFullError: its disk is full.

        """
        check_operators(all_operators().values())
        is_new = self._attachment.is_new()
        with (
            translated(self._explain),
            self._attachment.exclusive(),
            contextlib.ExitStack() as undo,
        ):
            connection = duckdb.connect(":memory:", config=settings_of(self._config))
            undo.callback(connection.close)
            # It would be printed between what the program prints; cursors do as their connection.
            connection.execute("SET enable_progress_bar = false")
            undo.callback(self._attachment.close)
            self._attachment.configure(connection)
            connection.execute(f"SET temp_directory = {quote(str(self.scratch_folder))}")
            self._attachment.attach(connection)
            for leftover in self.scratch_folder.glob(f"{COPY_PREFIX}*"):
                leftover.unlink(missing_ok=True)
            connection.execute("USE store")
            migrate(connection, self._attachment, is_new=is_new)
            create_public_views(connection)
            lock_down(connection, (str(self.scratch_folder), *self._attachment.reachable_folders))
            undo.pop_all()
        self._is_invalidated = False
        self._connection = connection
        if self._attachment.lacks_note:
            self._make_note()
        self._log_merging.start()

    def close(self) -> None:
        """Close the database; harmless when it is not open.

        Queries that run are ended. Rows half read keep the file until their reader lets go.
        """
        self._log_merging.stop()
        if self._connection is not None:
            self.merge_log()
        with self._write_lock, self._opening_lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                self._close(connection)
            self._attachment.close()

    @property
    def num_writes(self) -> int:
        """How many transactions have written, also before a reopening.

        Inside a transaction: those before it. A caller that remembers what it read, and finds this
        number where its own last transaction left it, may rely on what it remembers.
        """
        return self._num_writes

    @property
    def attachment(self) -> Attachment:
        """Where the tables lie."""
        return self._attachment

    @property
    def scratch_folder(self) -> Path:
        """A folder next to the file for what is thrown away: other folders may be read-only."""
        path = Path(self._config.path).absolute()
        return path.with_name(path.name + ".tmp")

    @property
    def num_users(self) -> int:
        """How many cursors are in use."""
        return self._usage.num_users

    def size_bytes(self) -> int:
        """Return the storage it takes, in bytes."""
        return self._attachment.size_bytes()

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Hand out a cursor of its own for the calling thread, closed at the end."""
        with self._usage.enter(), translated(self._explain):
            if self._is_invalidated:
                self._attach_again()
            cursor = self._new_cursor()
            self._cursors.add(cursor)
            try:
                cursor.execute("USE store")
                yield cursor
            finally:
                self._cursors.discard(cursor)
                cursor.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Hand out a cursor that alone writes; what it wrote is on disk at the end, or undone.

        Raises:
            StorageFullError: the disk is full. Nothing was written, or, rarely, all of it; the
                catalog can be used again once there is room.

        """
        with (
            self._write_lock,
            translated(self._explain),
            self._attachment.exclusive(),
            self.cursor() as cursor,
        ):
            if self._attachment.is_shared:
                self._num_writes += 1  # another process may have written
            cursor.begin()
            self._recorded = Recorded()
            try:
                yield cursor
                self._attachment.stamp(cursor, self._recorded)
                cursor.commit()
                if self._attachment.is_log_large():
                    self._merge_log(cursor)
            except BaseException:
                with contextlib.suppress(duckdb.Error):
                    cursor.rollback()
                raise
            finally:
                self._num_writes += 1
            self._attachment.acknowledge()

    def note(self, recorded: Recorded) -> None:
        """Say what the transaction records that runs in this thread."""
        self._recorded = recorded

    @contextlib.contextmanager
    def steady(self) -> Iterator[str]:
        """Let another process read the database until the end: its file is only added to.

        Yields what another process that has it open compares to see whether it must open it anew.
        """
        with self._usage.enter(), translated(self._explain):
            if self._is_invalidated:
                self._attach_again()
            self._shorten_log()
            with self._outside.enter():
                yield f"{self._num_writes}.{self._num_layouts}"

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let nobody else write until the end; readers go on."""
        with self._write_lock:
            yield

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Be the only one that writes the files anew, until the end; others wait."""
        with self._rewriting_lock:
            yield

    @contextlib.contextmanager
    def idle(self, wait_s: float) -> Iterator[duckdb.DuckDBPyConnection | None]:
        """Wait until nobody uses the database, and keep it so until the end; yield its one cursor.

        All is in its files by then. Afterwards it is attached anew: other files may be in place.
        Yields None where somebody read it all the time.
        """
        with self._write_lock, self._usage.idle(wait_s) as is_idle, translated(self._explain):
            if not is_idle:
                yield None
                return
            with self._new_cursor() as cursor:
                self._merge_log(cursor)
                try:
                    yield cursor
                finally:
                    self._is_invalidated = True
                    self._attach_again()

    def merge_log(self) -> None:
        """Merge the log, so that nothing rests on it alone for long."""
        if not self._attachment.log_bytes():
            return
        try:
            with self._write_lock, translated(self._explain), self.cursor() as cursor:
                self._merge_log(cursor)
        except ForetokenError as err:
            _log.warning("the log was not merged, and will be tried again; error=%s", err.message)

    def _make_note(self) -> None:
        """Commit nothing: the next note says that all before is on disk."""
        try:
            with self.transaction():
                pass
        except BaseException:
            self.close()
            raise

    def _shorten_log(self) -> None:
        """Merge the log for a process that is about to read it, where nothing keeps it from that.

        A log that is due keeps new readers waiting for those at work, so that it ends some time.
        """
        if not self._attachment.is_log_large(_LOG_RATIO_TO_READ):
            return
        if self._attachment.is_log_large():
            with self._outside.idle(_OUTSIDE_WAIT_S):
                pass
        if self._write_lock.acquire(blocking=False):
            try:
                with self._new_cursor() as cursor:
                    self._merge_log(cursor)
            finally:
                self._write_lock.release()

    def _merge_log(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Merge the log into the tables, unless another process reads them."""
        with self._outside.idle(0.0) as is_idle:
            if is_idle:
                self._attachment.merge_log(cursor)
                self._num_layouts += 1

    def _close(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Close the connection; where a cursor at work keeps it from that, end the work."""
        end_s = time.monotonic() + _CLOSING_WAIT_S
        while True:
            try:
                connection.close()
            except duckdb.Error:
                if time.monotonic() > end_s:
                    raise
                for cursor in tuple(self._cursors):
                    with contextlib.suppress(duckdb.Error):  # closed meanwhile
                        cursor.interrupt()
                time.sleep(_CLOSING_TICK_S)
            else:
                return

    def _new_cursor(self) -> duckdb.DuckDBPyConnection:
        with self._opening_lock:
            if self._connection is None:
                raise CatalogBusyError(f"the catalog {self._attachment.name} is not open")
            return self._connection.cursor()

    def _attach_again(self) -> None:
        # A writer at work must end first: it holds the database that is given up here.
        with self._write_lock:
            if not self._is_invalidated:
                return
            with self._outside.idle(_OUTSIDE_WAIT_S) as is_idle, self._new_cursor() as cursor:
                if not is_idle:
                    raise CatalogBusyError(
                        f"the catalog {self._attachment.name} must be opened anew, and is being "
                        "read; try again"
                    )
                cursor.execute("DETACH DATABASE IF EXISTS store")
                self._attachment.attach(cursor)
                self._num_layouts += 1
            self._is_invalidated = False

    def _explain(self, error: duckdb.Error) -> ForetokenError:
        if is_invalidated(error):
            self._is_invalidated = True
        return self._attachment.explain(error) or translate(error, self._attachment.name)


def attachment_of(config: CatalogConfig) -> Attachment:
    """Return where the tables of a catalog lie."""
    if config.lake is not None:
        return LakeAttachment(config.lake)
    return FileAttachment(Path(config.path), config.max_log_bytes)


def settings_of(config: CatalogConfig) -> dict[str, str | bool | int | float | list[str]]:
    """Return the settings that a database of this configuration is made with."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False
    }
    if config.num_threads:
        settings["threads"] = config.num_threads
    if config.memory_limit:
        settings["memory_limit"] = config.memory_limit
    return settings


def next_moment(cursor: duckdb.DuckDBPyConnection) -> int:
    """Return the next number of the counter; inside a transaction it is nobody else's."""
    rows = cursor.execute(
        "SELECT 1 + greatest((SELECT coalesce(max(batch_number), 0) FROM batch),"
        " (SELECT coalesce(max(review_number), 0) FROM review),"
        # The batches and reviews before a pruning may be gone.
        " (SELECT coalesce(max(pruning_number), 0) FROM pruning))"
    ).fetchall()  # to the end: a result half read keeps the cursor from other work
    return int(rows[0][0])
