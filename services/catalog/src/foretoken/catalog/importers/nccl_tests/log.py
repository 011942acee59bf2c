"""The text that nccl-tests print: which collective, on which devices, and its table of times.

Source: the printing code of https://github.com/NVIDIA/nccl-tests (`common.cu`, `util.cu`) from 2.0
to 2.17, which differ in the columns they have.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO, TextIOWrapper
from pathlib import Path

from foretoken.catalog.sources.content import check_lines, check_utf8
from foretoken.catalog.sources.file import SourceFile
from foretoken.domain.errors import InvalidRequestError

# What launchers put before each line: Open MPI's tags, and the rank of `srun -l`.
_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+:\s)")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf(?:_mpi)?\b")
_SETTINGS = re.compile(r"^# nThread \d+ nGpus \d+ .*?(?<!warmup )iters: (\d+)")
_AGGREGATED = re.compile(r"agg iters: (\d+)")
_GRAPH = re.compile(r"graph: (\d+)")
_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+"
    r"device\s+\d+\s+\[[0-9a-fA-Fx:.]+\]\s+(\S.*?)\s*$"
)
_NCCL_CODE = re.compile(r"nccl-library=(\d+)")
_NCCL_NAME = re.compile(r"^NCCL version (\d+(?:\.\d+)+)")
_COLUMNS = re.compile(r"^#\s+size\s+count\s+type\b(.*)$")
_OUT_OF_BOUNDS = re.compile(r"^# Out of bounds values\s*: (\d+)")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]")
# nccl-tests print lines of some hundred characters; a longer one is of another program.
_TEXT_MAX = 4_096
# NCCL's own messages, which may name the process.
_DEBUG = "NCCL "
_ENDED = "# Collective test concluded"
# Versions are coded as major, minor and patch of two digits each since 2.9, of one before.
_TWO_DIGITS_SINCE = 10_000


@dataclass(frozen=True, slots=True)
class Rank:
    """One line of the device list."""

    rank: int
    group: int
    host: str
    gpu: str


@dataclass(frozen=True, slots=True)
class Timing:
    """One time of a line: `num_wrong` is None where results were not compared."""

    time_us: float
    num_wrong: float | None


@dataclass(frozen=True, slots=True)
class TableLine:
    """One line of a table. `redop` is empty where the collective reduces nothing."""

    line: int
    size_bytes: int
    dtype: str
    redop: str
    out_of_place: Timing
    in_place: Timing | None


@dataclass(slots=True)
class TestLog:
    """What one run of a test printed; `program` is its name without `_perf`."""

    program: str = ""
    nccl_version: str = ""
    num_iterations: int = 0
    num_aggregated: int = 1
    has_graph: bool = False
    num_out_of_bounds: int = 0
    ranks: list[Rank] = field(default_factory=list)
    lines: list[TableLine] = field(default_factory=list)


def parse_log(source: SourceFile, path: Path) -> tuple[TestLog, ...]:
    """Return what every run of a test in a file printed, those with a table only.

    Raises:
        InvalidRequestError: a line of a table cannot be read; names the line.

    """
    reader = _Reader(path)
    check_utf8(source, path)
    check_lines(source, path)
    # Line by line: the text of a whole log would take several times its bytes.
    lines = TextIOWrapper(BytesIO(source.content), encoding="utf-8-sig")
    for number, text in enumerate(lines, 1):
        if len(text) <= _TEXT_MAX:
            reader.take(number, _PREFIX.sub("", text.rstrip(), count=1))
    return tuple(run for run in reader.runs if run.lines)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.runs = [TestLog()]
        self._path = path
        self._columns: list[str] = []

    @property
    def _run(self) -> TestLog:
        return self.runs[-1]

    def take(self, number: int, text: str) -> None:
        if columns := _COLUMNS.match(text):
            self._columns = ["size", "count", "type", *columns[1].split()]
        elif self._columns and _ROW.match(text):
            self._run.lines.append(self._parse_row(number, text.split()))
        elif rank := _RANK.match(text):
            found = Rank(int(rank[1]), int(rank[2] or 0), rank[3], rank[4])
            self._run.ranks.append(found)
        else:
            self._take_remark(text)

    def _take_remark(self, text: str) -> None:
        if self._run.lines and (_SETTINGS.match(text) or text.startswith("# nccl-tests version")):
            self._begin()
        if settings := _SETTINGS.match(text):
            self._run.num_iterations = int(settings[1])
            self._run.num_aggregated = _number_in(_AGGREGATED, text, 1)
            self._run.has_graph = _number_in(_GRAPH, text, 0) > 0
        elif code := _NCCL_CODE.search(text):
            self._run.nccl_version = _version_of(int(code[1]))
        elif name := _NCCL_NAME.match(text):
            self._run.nccl_version = name[1]
        elif wrong := _OUT_OF_BOUNDS.match(text):
            self._run.num_out_of_bounds = int(wrong[1])
        elif program := _program_in(text):
            if self._run.lines:
                self._begin()
            self._run.program = program

    def _begin(self) -> None:
        self.runs.append(TestLog(nccl_version=self._run.nccl_version))
        self._columns = []

    def _parse_row(self, number: int, cells: list[str]) -> TableLine:
        cells = self._align(number, cells)
        first = self._columns.index(self._time_column(number))
        size, dtype = cells[0], cells[2]
        named = dict(zip(self._columns[:first], cells, strict=False))
        times = list(self._timings(number, cells))
        redop = named.get("redop", "")
        return TableLine(
            line=number,
            size_bytes=int(size),
            dtype=dtype,
            redop="" if redop == "none" else redop,
            out_of_place=times[0],
            in_place=times[1] if len(times) > 1 else None,
        )

    def _align(self, number: int, cells: list[str]) -> list[str]:
        """Return a cell for every column: `redop` may be blank, a time stamp has two words."""
        columns = self._columns
        if columns[-1] == "timestamp":
            cells = [*cells[:-2], " ".join(cells[-2:])]
        if len(cells) == len(columns) - 1 and "redop" in columns:
            cells = [*cells[:3], "", *cells[3:]]
        if len(cells) != len(columns):
            raise self._fault(number, f"{len(cells)} cells in a table of {len(columns)} columns")
        return cells

    def _time_column(self, number: int) -> str:
        if "time" not in self._columns:
            raise self._fault(number, "the table has no device times (was it run with -C 1?)")
        return "time"

    def _timings(self, number: int, cells: list[str]) -> Iterator[Timing]:
        for place, column in enumerate(self._columns):
            if column == "time":
                # Tables before 2.12 have the largest error in place of a count of wrong values.
                is_count = self._columns[place + 3 : place + 4] == ["#wrong"]
                wrong = cells[place + 3] if is_count else "N/A"
                yield Timing(
                    self._number(number, column, cells[place]),
                    None if wrong == "N/A" else self._number(number, "#wrong", wrong),
                )

    def _number(self, number: int, column: str, cell: str) -> float:
        try:
            return float(cell)
        except ValueError as err:
            raise self._fault(number, f"{column}: {cell[:40]!r} is not a number") from err

    def _fault(self, number: int, description: str) -> InvalidRequestError:
        return InvalidRequestError.of_field("path", f"{self._path}, line {number}: {description}")


def _program_in(text: str) -> str:
    """Return the test that a line says is starting: a command, or the test's own remark."""
    found = _PROGRAM.search(text)
    is_other = _DEBUG in text or text.startswith(_ENDED)
    return found[1] if found and not is_other else ""


def _number_in(pattern: re.Pattern[str], text: str, default: int) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else default


def _version_of(code: int) -> str:
    base = 100 if code >= _TWO_DIGITS_SINCE else 10
    major, rest = divmod(code, 100 * base)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"
