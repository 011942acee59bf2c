"""A module's name says what is in it."""

from pathlib import Path

_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "manager", "base", "impl", "misc"}


def test_no_module_has_a_name_that_says_nothing(python_files: list[Path]) -> None:
    offenders = [str(path) for path in python_files if _SAY_NOTHING & {path.stem, path.parent.name}]
    assert offenders == []


def test_no_module_repeats_the_name_of_its_folder(python_files: list[Path]) -> None:
    offenders = [str(path) for path in python_files if path.stem == path.parent.name]
    assert offenders == []


def test_test_files_have_unique_names(repository: Path) -> None:
    """pytest imports a test file by its bare name, so two of the same name would be one."""
    files = sorted((repository / "tests").rglob("test_*.py"))
    first_of_name = {path.name: path for path in reversed(files)}
    assert [str(path) for path in files if first_of_name[path.name] != path] == []
