"""Files and functions stay small enough to be read at once."""

import ast
from pathlib import Path

import pytest

# `make check` runs these.
pytestmark = pytest.mark.slow

_MAX_FILE_LINES = 500
_MAX_FUNCTION_LINES = 60
_MAX_PARAMETERS = 6
# A command's parameters are its options, which typer reads from the signature; beyond a handful a
# command takes a file instead.
_MAX_COMMAND_PARAMETERS = 8

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def functions(python_files: list[Path]) -> list[tuple[Path, str, int, int]]:
    """Every function people write: its file, its place, how many lines and parameters it has."""
    return [
        (path, f"{path}:{node.lineno} {node.name}", _count_lines(node), _count_parameters(node))
        for path in python_files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, _Function)
    ]


def test_no_file_is_longer_than_500_lines(python_files: list[Path]) -> None:
    too_long = {
        str(path): num_lines
        for path in python_files
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > _MAX_FILE_LINES
    }
    assert too_long == {}


def test_no_function_is_longer_than_60_lines(
    functions: list[tuple[Path, str, int, int]],
) -> None:
    too_long = {
        place: num_lines for _, place, num_lines, _ in functions if num_lines > _MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_no_function_takes_more_than_six_parameters(
    functions: list[tuple[Path, str, int, int]],
) -> None:
    """`self` and `cls` do not count: the caller does not write them."""
    too_many = {
        place: num_parameters
        for path, place, _, num_parameters in functions
        if num_parameters > _limit_of(path)
    }
    assert too_many == {}


def test_the_measures_count_what_they_say() -> None:
    """A measure that always answered 0 would let every limit pass."""
    source = "def f(self, a, /, b, *args, c, **rest):\n    x = 1\n    return x\n"
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert (3, 5) == (_count_lines(function), _count_parameters(function))


def _count_lines(function: _Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def _limit_of(path: Path) -> int:
    return _MAX_COMMAND_PARAMETERS if path.parent.name == "cli" else _MAX_PARAMETERS


def _count_parameters(function: _Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return len([a for a in named if a.arg not in ("self", "cls")]) + len(starred)
