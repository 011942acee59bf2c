"""Machine code is kept between processes, and never outlives the sources it was made from."""

import ast
import ctypes
from collections.abc import Callable
from pathlib import Path

import foretoken.simulator
from foretoken.simulator.jit import COMPILED_SOURCES, Addressed, compiled, is_ready

_FOLDER = Path(foretoken.simulator.__path__[0])
_NAMED = {path for pattern in COMPILED_SOURCES for path in _FOLDER.glob(pattern)}


def test_a_compiled_function_answers_as_the_plain_one() -> None:
    def double(number: int) -> int:
        return 2 * number

    assert compiled(double)(21) == 42


def test_every_compiled_function_that_calls_others_is_kept_by_all_their_sources() -> None:
    """The compiler looks at a function's own file alone; a change beside it must be seen too."""
    modules = {_module_of(path): path for path in _FOLDER.rglob("*.py")}
    compiling = {name for name, path in modules.items() if "@compiled" in path.read_text("utf-8")}
    not_named = sorted(
        name
        for name in compiling
        if modules[name] not in _NAMED and compiling & _imports(modules[name])
    )
    assert [] == not_named
    assert len(compiling) > 1


def _module_of(path: Path) -> str:
    return "foretoken.simulator." + ".".join(path.relative_to(_FOLDER).with_suffix("").parts)


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def _make_half() -> Callable[[int], int]:
    def half(number: int) -> int:
        return number // 2

    return half


def test_what_was_compiled_here_or_is_kept_need_not_be_compiled() -> None:
    first = compiled(_make_half())
    assert first(42) == 21
    assert is_ready(first)
    assert is_ready(compiled(_make_half()))


def test_a_function_with_an_address_is_called_by_it() -> None:
    third = Addressed(_make_third(), "int64(int64)")
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(third.address)
    assert call(42) == 14
    assert third.is_ready


def _make_third() -> Callable[[int], int]:
    def third(number: int) -> int:
        return number // 3

    return third
