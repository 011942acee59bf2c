"""`make mutate` changes a module in a copy, and tells which changes its tests notice."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = _ROOT / "tests" / "mutation" / "mutate.py"
_MODULE = "foretoken.simulator.engine.schedulers.orca"
_FILE = _ROOT / "services/simulator/src/foretoken/simulator/engine/schedulers/orca.py"
_FOLDER = "tests/unit/simulator/serving"
_NAMES = ("schedulers_golden", "schedulers_drawn", "scheduler_orca")
_TESTS = " ".join(f"{_FOLDER}/test_{name}.py" for name in _NAMES)


@pytest.mark.slow
def test_a_module_has_the_tests_that_bear_its_name_or_its_folders() -> None:
    assert f"{_MODULE}: {_TESTS}\n" == _run("--list")


@pytest.mark.slow
def test_a_change_is_killed_by_the_modules_own_tests_and_by_no_others() -> None:
    before = _FILE.read_text(encoding="utf-8")
    killed = _run("--sample", "1")
    survived = _run("--sample", "1", "--tests", "tests/unit/domain/test_domain_units.py")
    assert killed.splitlines()[-1] == "1 of 1 mutants killed (100%)"
    assert survived.splitlines()[-1] == "0 of 1 mutants killed (0%)"
    assert before == _FILE.read_text(encoding="utf-8")


def _run(*arguments: str) -> str:
    command = [sys.executable, str(_PROGRAM), _MODULE, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
