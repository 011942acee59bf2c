"""Plug-ins and data files found by scanning folders."""

from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.plugins import parse_yaml, scan_modules, scan_yaml


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return an importable package with two plug-ins; its name is the test's own."""
    name = f"{request.node.name}_plugins"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "second.py").write_text("SPEC = 2\n")
    (folder / "first.py").write_text("SPEC = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_every_module_of_a_folder_is_found_by_name(package: str) -> None:
    found = scan_modules(package, "SPEC")
    assert [("first", 1), ("second", 2)] == list(found.items())


def test_a_module_without_the_attribute_is_an_error(package: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"first has no PASS"):
        scan_modules(package, "PASS")


def test_another_distribution_joins_by_entry_point(package: str, tmp_path: Path) -> None:
    metadata = tmp_path / "outsider-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{package}]\nthird = outsider:SPEC\n")
    (tmp_path / "outsider.py").write_text("SPEC = 3\n")
    assert {"first": 1, "second": 2, "third": 3} == scan_modules(package, "SPEC")


def test_data_files_come_by_stem_in_order(package: str, tmp_path: Path) -> None:
    data = tmp_path / package / "devices"
    data.mkdir()
    (data / "b.yaml").write_text("x: 2\n")
    (data / "a.yaml").write_text("x: 1\n")
    (data / "README.md").write_text("not data\n")
    assert [("a", {"x": 1}), ("b", {"x": 2})] == list(scan_yaml(package, "devices"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("165e12", 165e12),
        ("1.5e-3", 1.5e-3),
        ("-3E4", -3e4),
        (".5e+1", 5.0),
        ("12", 12),
        ("e12", "e12"),
        ("1e", "1e"),
        ("yes", True),
    ],
)
def test_numbers_with_exponents_are_numbers(text: str, expected: object) -> None:
    found = parse_yaml(f"x: {text}", "test")["x"]
    assert (expected, type(expected)) == (found, type(found))


@pytest.mark.parametrize("text", ["x: [1", "- 1\n- 2", "", "!!python/object/apply:os.getcwd []"])
def test_anything_but_a_yaml_mapping_is_an_error_that_names_the_file(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"devices/x\.yaml"):
        parse_yaml(text, "devices/x.yaml")
