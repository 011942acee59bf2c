"""Machine code is kept between processes, and never outlives the sources it was made from."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foretoken.simulator.jit import Addressed, compiled, is_ready


def test_a_compiled_function_answers_as_the_plain_one() -> None:
    def double(number: int) -> int:
        return 2 * number

    assert compiled(double)(21) == 42


@pytest.mark.slow
def test_a_changed_constant_of_another_file_is_seen_with_a_warm_cache(tmp_path: Path) -> None:
    """Either compiler looks at a function's own file alone; a constant is compiled in."""
    folder = tmp_path / "foretoken" / "probe"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text(
        "import foretoken.predictor.regression.jit as loops, foretoken.simulator.jit as engine\n"
        "from foretoken.probe.rule import SHARE\n"
        "@engine.compiled\n"
        "def tell():\n"
        "    return SHARE\n"
        "@loops.compiled\n"
        "def say():\n"
        "    return SHARE\n"
        "for function in (tell, say):\n"
        "    print(function(), sum(function.stats.cache_hits.values()))\n"
    )
    told = []
    for share in (7, 7, 8):
        (folder / "rule.py").write_text(f"SHARE = {share}\n")
        told.append(_run_probe(tmp_path).splitlines())
    assert [["7 0"] * 2, ["7 1"] * 2, ["8 0"] * 2] == told


@pytest.mark.slow
def test_what_an_image_ships_compiled_is_used(tmp_path: Path) -> None:
    """By a process whose own folder is yet to be made, though the shipped one is read only."""
    folder = tmp_path / "foretoken" / "probe"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text(
        "from foretoken.simulator.jit import compiled\n"
        "@compiled\n"
        "def tell():\n"
        "    return 7\n"
        "print(tell(), sum(tell.stats.cache_hits.values()))\n"
    )
    shipped, kept = tmp_path / "cache", tmp_path / "run" / "kept"
    assert "7 0" == _run_probe(tmp_path)
    shipped.chmod(0o555)
    moved = {"FORETOKEN_COMPILED": str(shipped), "NUMBA_CACHE_DIR": str(kept)}
    assert "7 1" == _run_probe(tmp_path, **moved)
    assert ["kept"] == [path.name for path in kept.parent.iterdir()]
    assert "7 1" == _run_probe(tmp_path, **moved)


def _run_probe(folder: Path, **others: str) -> str:
    variables = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        **others,
    }
    command = [sys.executable, "-c", "import foretoken.probe.code"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


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
