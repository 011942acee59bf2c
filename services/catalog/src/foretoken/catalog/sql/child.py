"""The program of a process that answers SQL: `python -m foretoken.catalog.sql.child`.

Its first line of input is a `Setup`, every other a `Question`; its output are frames. It ends with
its input, so that none outlives its catalog.
"""

import contextlib
import json
import os
import queue
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NoReturn

import duckdb
import pyarrow as pa

from foretoken.catalog.sql.frame import Kind, Question, Setup, limit_error, write_frame
from foretoken.catalog.sql.policy import check_query
from foretoken.catalog.storage.literal import quote
from foretoken.catalog.storage.lockdown import lock_down
from foretoken.catalog.storage.store import attachment_of, settings_of
from foretoken.domain.errors import InvalidRequestError, QueryLimitError

# What the reader has in memory of an answer at a time; less than a message of gRPC holds, so that
# rows before an error arrive.
_PIECE_BYTES = 2**20
# Of one row: pieces are not cut within a row.
_MAX_ROW_BYTES = 16 * 2**20


def cut_rows(
    batches: Iterable[pa.RecordBatch], num_wanted: int, max_rows: int, max_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows up to those wanted (0: all), in pieces of about a MiB.

    Raises:
        QueryLimitError: more are wanted and there than may be sent, or one is too large.

    """
    num_rows = num_bytes = 0
    for batch in batches:
        rows = batch.slice(0, num_wanted - num_rows) if num_wanted else batch
        num_left = max_rows - num_rows
        num_rows += rows.num_rows
        for piece in _split(rows.slice(0, num_left)):
            num_bytes += piece.nbytes
            if num_bytes > max_bytes:
                raise limit_error("size", f"has a result of more than {max_bytes >> 20} MiB")
            yield piece
        if num_rows > max_rows:
            raise limit_error("rows", f"has a result of more than {max_rows} rows")
        if num_rows == num_wanted and num_wanted:
            return


def _split(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    pending = [rows]
    while pending:
        piece = pending.pop()
        if piece.nbytes <= _PIECE_BYTES or (piece.num_rows == 1 and piece.nbytes <= _MAX_ROW_BYTES):
            yield piece
        elif piece.num_rows == 1:
            raise limit_error("size", f"has a row of more than {_MAX_ROW_BYTES >> 20} MiB")
        else:
            half = piece.num_rows // 2
            pending += [piece.slice(half), piece.slice(0, half)]


_BATCH_ROWS = 100_000


class Reader:
    """A database of its own memory, which the catalog's tables are attached to for reading."""

    def __init__(self, setup: Setup) -> None:
        """Keep the setup; the first question opens the tables."""
        self._setup = setup
        self._revision = ""
        self._connection: duckdb.DuckDBPyConnection | None = None

    def ask(self, question: Question) -> Iterator[pa.RecordBatch | pa.Schema]:
        """Yield the columns, then the rows.

        Raises:
            InvalidRequestError: it is not a question `check_query` allows.
            QueryLimitError: it has more rows than it may.
            duckdb.Error, pa.ArrowException, OSError: DuckDB refuses it, or fails.

        """
        connection = self._open(question.revision)
        statement = check_query(connection, question.text, self._setup.views)
        setup = self._setup
        with self._transaction(connection):
            rows = connection.sql(statement).to_arrow_reader(_BATCH_ROWS)
            yield rows.schema
            yield from cut_rows(rows, question.num_wanted, setup.max_rows, setup.max_result_bytes)
            rows.close()

    @contextlib.contextmanager
    def _transaction(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            yield
        finally:
            try:
                connection.execute("ROLLBACK")
            except duckdb.Error:
                self.close()

    def close(self) -> None:
        """Forget the tables; the next question opens them anew."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _open(self, revision: str) -> duckdb.DuckDBPyConnection:
        """Return a connection to the tables as they are since that revision."""
        if self._connection is not None and revision == self._revision:
            return self._connection
        self.close()
        setup = self._setup
        attachment = attachment_of(setup.catalog)
        connection = duckdb.connect(":memory:", config=settings_of(setup.catalog))
        connection.execute("SET enable_progress_bar = false")
        attachment.configure(connection)
        connection.execute(f"SET temp_directory = {quote(setup.spill_folder)}")
        connection.execute(f"SET max_temp_directory_size = '{setup.max_spill_bytes} bytes'")
        attachment.attach_for_reading(connection, Path(setup.spill_folder))
        connection.execute("USE store")
        lock_down(connection, (setup.spill_folder, *attachment.reachable_folders))
        self._connection, self._revision = connection, revision
        return connection


# How the process ends that has taken more memory than it may.
EXIT_MEMORY = 70
# How it ends when it can look at its memory no more.
EXIT_UNWATCHED = 71
# In addition to what DuckDB counts: the program and its libraries (120 MiB), values that DuckDB
# does not count, rows on their way.
_OVERHEAD_BYTES = 256 * 2**20
_TICK_S = 0.02
# DuckDB reserves 1.2 GiB of addresses at its start, and 3 GiB later, for what it does not use; each
# thread has a stack.
_RESERVED_BYTES = 8 * 2**30
# The most there is: whatever else the catalog does goes first.
_NICENESS = 19
# The kernel takes the process with the most first where memory runs out.
_FIRST_TO_GO = b"1000"
_STATUS = Path("/proc/self/statm")
# What DuckDB's errors begin with when the question is not at fault.
_NOT_ITS_FAULT = re.compile(r"(IO|INTERNAL|FATAL|Serialization|Interrupt|INTERRUPT|HTTP) Error")


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the catalog decides when to stop
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    setup = Setup.from_json(sys.stdin.readline())
    limit_bytes = _limit_of(setup)
    _step_back(4 * limit_bytes + _RESERVED_BYTES)
    # Waits by the clock that nobody sets; `time.sleep` fails under a library that sets one.
    tick = threading.Event().wait
    threading.Thread(target=watch_memory, args=(limit_bytes, tick), daemon=True).start()
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(questions,), daemon=True).start()
    answerer = _Answerer(setup, answers)
    write_frame(answers, Kind.READY, b"")
    while True:
        answerer.answer(Question.from_json(questions.get()))


def _limit_of(setup: Setup) -> int:
    """Return the memory at which the process ends, in bytes."""
    return setup.memory_bytes + _OVERHEAD_BYTES


def _listen(questions: "queue.SimpleQueue[str]") -> None:
    """Hand on the lines of the input; end the process with it, whatever that is doing."""
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)


def _step_back(data_bytes: int) -> None:
    """Leave the processor and the memory to others, as far as this system lets a process do so."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_FIRST_TO_GO)
    # A value of many GiB does not wait for the watch, which stands still while DuckDB parses.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))


def watch_memory(limit_bytes: int, wait: Callable[[float], object]) -> NoReturn:
    """End the process when it has more, and also when nothing watches it any more.

    `wait` waits for so many seconds between two looks.
    """
    try:
        while _resident_bytes() <= limit_bytes:
            wait(_TICK_S)
    except BaseException:  # noqa: BLE001 - none watches on, and memory is not why
        traceback.print_exc()
        os._exit(EXIT_UNWATCHED)
    os._exit(EXIT_MEMORY)


def _resident_bytes() -> int:
    """Return the memory the process has; where the system does not say, the most it ever had."""
    try:
        return int(_STATUS.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


class _Answerer:
    """Writes answers, one after another, to one file."""

    def __init__(self, setup: Setup, file: IO[bytes]) -> None:
        self._setup = setup
        self._file = file
        self._reader = Reader(setup)
        self._large_bytes = _limit_of(setup) // 2

    def answer(self, question: Question) -> None:
        try:
            for part in self._reader.ask(question):
                self._write(part)
        except InvalidRequestError as err:
            self._end(Kind.REFUSED, message=err.violations[0].description)
        except QueryLimitError as err:
            self._end(Kind.LIMIT, message=err.message, limit=err.details["limit"])
        except (duckdb.Error, OSError, pa.ArrowException, MemoryError) as err:
            self._explain(err)
        else:
            self._end(Kind.END)

    def _end(self, kind: Kind, **fields: str) -> None:
        """End the answer; a process that has much of its memory by now is used no more."""
        is_large = _resident_bytes() > self._large_bytes
        write_frame(self._file, kind, json.dumps({"is_large": is_large, **fields}).encode())

    def _write(self, part: pa.Schema | pa.RecordBatch) -> None:
        is_schema = isinstance(part, pa.Schema)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part if is_schema else part.schema) as writer:
            if not is_schema:
                writer.write_batch(part)
        kind = Kind.COLUMNS if is_schema else Kind.ROWS
        write_frame(self._file, kind, memoryview(sink.getvalue()))

    def _explain(self, failure: Exception) -> None:
        """Say what an error of DuckDB, or of the Arrow stream it comes through, means."""
        text = str(failure) or type(failure).__name__
        if isinstance(failure, MemoryError) or text.startswith("Out of Memory"):
            limit, num_bytes = "memory", self._setup.memory_bytes
            if "max_temp_directory_size" in text:
                limit, num_bytes = "disk", self._setup.max_spill_bytes
            error = limit_error(limit, f"needs more than {num_bytes >> 20} MiB of {limit}")
            self._end(Kind.LIMIT, message=error.message, limit=limit)
        elif _NOT_ITS_FAULT.match(text):
            self._reader.close()
            self._end(Kind.FAILED, message=text, error=type(failure).__name__)
        else:
            self._end(Kind.REFUSED, message=text)


if __name__ == "__main__":
    main()
