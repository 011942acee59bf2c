"""What every command shares: the configuration, tables, progress, errors and the exit status.

Ports and progress bars are imported where they are used, for help and lists need none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foretoken.app.cli.data_output import (
    DATA_OUTPUTS,
    TimeLeft,
    describe_error,
    key_of,
    write_csv,
    write_json,
)
from foretoken.app.config import process_environment
from foretoken.domain.errors import ForetokenError
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.plugins import parse_yaml_value
from foretoken.domain.results.methods import to_plain

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from foretoken.app.compose import Composition
    from foretoken.app.config import AppConfig
    from foretoken.domain.job import Job
    from foretoken.domain.results.echo import Echo
    from foretoken.domain.results.report import Feasibility
    from foretoken.page.block import Table as PageTable
    from foretoken.page.section import Section

# Results go to stdout; everything else to stderr, so that output can be piped.
# What a pipe or a file receives is not folded at eighty columns, unless COLUMNS sets a width.
_PIPED_WIDTH = 160
# As long as the longest names of operators, devices and models.
_NAME_WIDTH = 20
# Where there is no terminal for a bar, a line says this often how far a job is.
_LINE_S = 10.0
_notes = Console(stderr=True)
# How results of the command that runs are printed; errors follow it.
_output = ContextVar("output", default="table")
NO_ANSWER = 3


Item = TypeVar("Item")
# What each column of a table shows of an item: an attribute by its name, or what is made of it.
ItemColumns: TypeAlias = Mapping[str, str | Callable[[Item], object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CliState:
    """Set up once by the root command and handed to every other."""

    config: AppConfig
    output: str = "table"

    @property
    def is_data(self) -> bool:
        """Whether results are printed for programs: as JSON or CSV."""
        return self.output in DATA_OUTPUTS

    def with_config(self, config: AppConfig) -> CliState:
        """Return the same state over another configuration."""
        return replace(self, config=config)

    def print_object(self, value: Any, table: Callable[[], Table], *echoes: Echo) -> None:
        """Print a result: JSON of the whole value, or its table and the echoes of its answers.

        JSON of one answer has its `echo`, be it a field of the value or not. CSV has a row for each
        item of a list, and one of the single values of another result, by their dotted paths.
        """
        if self.is_data:
            encoded = to_plain(value)
            if len(echoes) == 1 and isinstance(encoded, dict):
                encoded = {**encoded, "echo": to_plain(echoes[0])}
            write = write_csv if self.output == "csv" else write_json
            write(encoded)
        else:
            has_width = sys.stdout.isatty() or "COLUMNS" in process_environment()
            Console(width=None if has_width else _PIPED_WIDTH).print(with_echo(table(), *echoes))

    def print_rows(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        keys: Sequence[str] = (),
    ) -> None:
        """Print rows as a table, or as data whose keys are `keys`, else those of the columns."""
        names = keys or [key_of(column) for column in columns]
        records = [dict(zip(names, row, strict=True)) for row in rows]
        self.print_object(records, lambda: build_table(title, columns, rows))

    def print_items(self, title: str, items: Iterable[Item], columns: ItemColumns[Item]) -> None:
        """Print a row for each item; a column is an attribute by its name, or made of the item."""
        self.print_rows(title, list(columns), _rows_of(items, columns))


def _rows_of(items: Iterable[Item], columns: ItemColumns[Item]) -> list[list[object]]:
    return [
        [getattr(item, of) if isinstance(of, str) else of(item) for of in columns.values()]
        for item in items
    ]


def item_table(title: str, items: Iterable[Item], columns: ItemColumns[Item]) -> Table:
    """Return a table with a row for each item; columns as of `CliState.print_items`."""
    return build_table(title, list(columns), _rows_of(items, columns))


def build_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Collection[int] = (),
) -> Table:
    """Return a table whose numeric columns, and those of `numbers`, are aligned right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        is_number = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        is_number = is_number or index in numbers
        justify: Literal["left", "right"] = "right" if is_number else "left"
        # Names are not folded, which a narrow terminal would do; labels of several words are.
        longest = max((len(format_cell(row[index])) for row in rows), default=0)
        is_name = index == 0 and longest <= _NAME_WIDTH
        table.add_column(column, justify=justify, overflow="fold", no_wrap=is_name)
    for row in rows:
        # Brackets of a cell ("C[m,n]") are text, not the library's markup.
        table.add_row(*(escape(format_cell(cell)) for cell in row))
    return table


def page_table(title: str, table: PageTable) -> Table:
    """Return a page's table for a terminal, its cells as the page writes them."""
    numbers = {place for place, column in enumerate(table.columns) if not column.is_text}
    return build_table(title, [column.title for column in table.columns], table.texts(), numbers)


def format_cell(cell: object) -> str:
    """Return a cell's text; floats keep four significant digits."""
    if isinstance(cell, float):
        return format_number(cell, digits=4, decimals=1)
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell)


def format_ratio(ratio: float, num_observed: int) -> str:
    """Return a ratio in per cent, or a dash where nothing was observed."""
    return f"{ratio:.1%}" if num_observed else "-"


def note(message: str) -> None:
    """Tell the user something that is not the result."""
    _notes.print(message, highlight=False, soft_wrap=True)


def note_search(job: Job) -> None:
    """Tell which job a search is, by which it is watched again, and whether it was begun before."""
    goes_on = " goes on where it was left" if job.progress_ratio > 0 else ""
    about = f" ({job.title})" if job.title else ""
    note(f"search {job.job_id}{about}{goes_on}; Ctrl-C cancels it")


def note_jobs(job_ids: Sequence[str]) -> None:
    """Tell which jobs made the results, by which they are found again."""
    note(f"result of {', '.join(job_ids)}; `foretoken compare` sets results side by side")


def state_of(context: typer.Context) -> CliState:
    """Return the state the root command set up."""
    state = context.find_root().obj
    if not isinstance(state, CliState):
        raise typer.Exit(code=2)
    return state


@contextmanager
def open_composition(state: CliState) -> Iterator[Composition]:
    """Yield the ports of this process."""
    from foretoken.app.compose import Composition

    with Composition(state.config, on_join=_note_owner, tell=note) as composition:
        yield composition


@contextmanager
def open_services(context: typer.Context) -> Iterator[tuple[CliState, Composition]]:
    """Yield the state of a command, and the ports of this process by it."""
    state = state_of(context)
    with open_composition(state) as services:
        yield state, services


def _note_owner(pid: int) -> None:
    note(f"process {pid} has the catalog open; this one works with it through that")


def choose_output(output: str) -> None:
    """Say how the command that runs prints, before there is a state."""
    _output.set(output)


def fail(error: ForetokenError) -> None:
    """Print an error, as the JSON of the HTTP API where results are data; leave with status 1."""
    fail_as_data(error, 1)
    _notes.print(f"[red]error[/red] ({error.reason.lower()}): ", end="", highlight=False)
    _notes.print(error.message, markup=False, highlight=False, soft_wrap=True)
    if error.trace_id:
        note(f"[dim]in the service's log: trace_id={error.trace_id}[/dim]")
    raise typer.Exit(code=1) from error


def fail_as_data(error: ForetokenError, status: int) -> None:
    """Print an error as JSON and leave, where results are data; else do nothing."""
    if _output.get() in DATA_OUTPUTS:
        sys.stderr.write(json.dumps(describe_error(error), ensure_ascii=False) + "\n")
        raise typer.Exit(code=status) from error


class ProgressBar:
    """A bar on stderr, or now and then a line. Call it with a job at each change, or set it."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._told_s = time.monotonic()
        self._told: set[str] = set()
        self._left = TimeLeft()

    def __call__(self, job: Job) -> None:
        """Show how far a job is, and each of its notices on a line of its own."""
        for notice in job.notices:
            if notice not in self._told:
                self._told.add(notice)
                note(escape(notice))
        self.set(job.progress_ratio, job.message)

    def set(self, ratio: float, message: str) -> None:
        """Show a ratio from 0 to 1."""
        now_s = time.monotonic()
        left = self._left.describe(ratio, now_s)
        message = ", ".join(filter(None, (message, left)))
        self._progress.update(self._task, completed=ratio, message=message)
        if message and not _notes.is_terminal and now_s - self._told_s >= _LINE_S:
            self._told_s = now_s
            note(f"{ratio:4.0%} {escape(message)}")


@contextmanager
def show_progress(title: str) -> Iterator[ProgressBar]:
    """Yield a progress bar; where stderr is no terminal, lines say what began and how far it is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not _notes.is_terminal:
        note(title)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[message]}"),
    )
    disabled = not _notes.is_terminal
    with Progress(*columns, console=_notes, transient=True, disable=disabled) as progress:
        yield ProgressBar(progress, progress.add_task(title, total=1.0, message=""))


def check_output_path(path: Path | None) -> Path | None:
    """Return the path of a file to write; refused now rather than after minutes of work.

    Raises:
        typer.BadParameter: it is a folder, or its folder is absent or cannot be written to.

    """
    if path is None:
        return None
    target = path if path.exists() else path.resolve().parent
    if path.is_dir() or not target.exists():
        raise typer.BadParameter(f"{path} is a folder" if path.is_dir() else f"no folder {target}")
    if not os.access(target, os.W_OK):
        raise typer.BadParameter(f"cannot write to {target}")
    return path


def scenario_changes(words: Sequence[str] | None) -> dict[str, Any]:
    """Return `--set` words as overrides by dotted path, their values read as YAML.

    Nothing after the equals sign is the empty text, as a shell drops the quotes around it.
    """
    return {
        name: parse_yaml_value(value, f"--set {name}") if value else ""
        for name, value in parse_assignments(words or []).items()
    }


def describe_feasibility(feasibility: Feasibility) -> str:
    """Return whether a configuration can run, and if not why."""
    return "yes" if feasibility.is_feasible else f"no: {feasibility.reason}"


def parse_assignments(words: Sequence[str]) -> Mapping[str, str]:
    """Return `name=value` words as a mapping.

    Raises:
        typer.BadParameter: a word without `=`, or a name that is there twice.

    """
    pairs: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"expected NAME=VALUE, found {word!r}")
        if name in pairs:
            raise typer.BadParameter(f"{name} is given twice: {pairs[name]!r} and {value!r}")
        pairs[name] = value
    return pairs


def stack(*parts: Table | str) -> Table:
    """Return the parts below each other; a blank line sets a table off from what is above it."""
    grid = Table.grid()
    for index, part in enumerate(parts):
        if index and isinstance(part, Table):
            grid.add_row("")
        grid.add_row(Text(part) if isinstance(part, str) else part)
    return grid


def stack_sections(sections: Sequence[Section]) -> Table:
    """Return the sections of a page for a terminal, without pictures.

    A table of words is a paragraph a row, as columns of them would be folded; the last column is
    what to do, which is not said twice.
    """
    parts: list[Table | str] = []
    for section in sections:
        facts = [f"{item.label}: {item.value}, {item.note}".rstrip(", ") for item in section.facts]
        title = "" if section.table else section.title
        texts = [text for text in (title, section.intro, *facts) if text]
        parts += ["", *texts] if texts else []
        if section.table is None:
            continue
        if not all(column.is_text for column in section.table.columns):
            parts.append(page_table(section.title, section.table))
            continue
        said = {""}
        for *_, text, advice in section.table.texts():
            parts.append(f"- {text}" + (f"\n  -> {advice}" if advice not in said else ""))
            said.add(advice)
    return stack(*parts)


def with_echo(table: Table, *echoes: Echo) -> Table:
    """Return a table with the echoes of its answers below; what several say stands once."""
    lines = dict.fromkeys(line for echo in echoes for line in echo.lines())
    return stack(table, "", *lines) if lines else table


def leave_unless(has_answer: bool) -> None:
    """Leave with status 3, once everything is printed and written, where nothing does it."""
    if not has_answer:
        raise typer.Exit(code=NO_ANSWER)
