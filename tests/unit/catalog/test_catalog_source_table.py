"""Faults in another tool's files name the file, and the line where there is one."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from foretoken.catalog.sources.file import read_source_file
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.arrow import MEASUREMENT_SCHEMA, check_measurement_table


def _parse(folder: Path, text: str, required: tuple[str, ...] = ()) -> SourceTable:
    path = folder / "a.csv"
    path.write_text(text)
    return parse_csv(read_source_file(path, folder), path, required)


def test_a_file_is_known_by_its_place_and_content(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "a.csv"
    path.write_text("x\n1\n")
    source = read_source_file(path, tmp_path)
    sha256 = hashlib.sha256(b"x\n1\n").hexdigest()
    assert ("deep/a.csv", sha256) == (source.name, source.content_hash)
    path.write_text("x\n2\n")
    assert source.content_hash != read_source_file(path, tmp_path).content_hash


def test_a_git_lfs_pointer_is_said(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    with pytest.raises(InvalidRequestError, match=r"a.csv is a Git LFS pointer.*git lfs pull"):
        _parse(tmp_path, text)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"a.csv: missing columns y, z"):
        _parse(tmp_path, "x\n1\n", ("x", "y", "z"))
    with pytest.raises(InvalidRequestError, match=r"a.csv: column 'y' is missing"):
        _parse(tmp_path, "x\n1\n").numbers("y")


@pytest.mark.parametrize("text", ["", "x,y\n1,2\n3\n", "x\n\x00\xff\n"], ids=repr)
def test_what_is_no_table_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=r"a.csv"):
        parse_csv(read_source_file(path, tmp_path), path).numbers("x")


def test_empty_cells_are_not_numbers(tmp_path: Path) -> None:
    numbers = _parse(tmp_path, "x,y\n1,a\n,b\nnan,c\n2.5,d\n").numbers("x")
    assert [1.0, "nan", "nan", 2.5] == [v if np.isfinite(v) else str(v) for v in numbers.tolist()]


def test_a_word_among_numbers_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"a.csv, line 3: x: 'two' is not a number"):
        _parse(tmp_path, "x\n1\ntwo\n").numbers("x")


@pytest.mark.parametrize("cell", ["1.5", "", "1e30", "inf"])
def test_a_count_that_is_not_whole_names_its_line(cell: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"a.csv, line 3: x: .* is not a whole number"):
        _parse(tmp_path, f"x,y\n1,1\n{cell},1\n").integers("x")


def test_booleans_are_words_or_digits(tmp_path: Path) -> None:
    table = _parse(tmp_path, "x,y,z\nTrue,1,yes\nFalse,0,no\n")
    assert [True, False] == table.flags("x").tolist() == table.flags("y").tolist()
    with pytest.raises(InvalidRequestError, match="line 2: z: 'yes' is neither true nor false"):
        table.flags("z")


def test_rows_carry_where_they_came_from(tmp_path: Path) -> None:
    origin = _parse(tmp_path, "t\n1\n2\nnan\n")
    facts = RowFacts(operator="gemm", dtype="fp16", device="a30", kernel="cutlass")
    rows = np.array([1, 2])
    times = {"median": origin.numbers("t")[rows]}
    table = check_measurement_table(
        build_rows(facts, origin, rows, {"m": rows, "n": 8, "k": 8}, times)
    )
    assert MEASUREMENT_SCHEMA == table.schema
    found = [
        (r["source_file"], r["source_row"], r["status"], r["latency_us_median"], r["kernel"])
        for r in table.to_pylist()
    ]
    expected = [("a.csv", 2, "ok", 2.0, "cutlass"), ("a.csv", 3, "failed", None, "cutlass")]
    assert expected == found
    assert "the source has no time for this row" == table.to_pylist()[1]["status_reason"]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"a.csv: columns twice: x"):
        _parse(tmp_path, "x,y,x\n1,2,3\n")


def test_a_header_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"a.csv: has no rows"):
        _parse(tmp_path, "x,y\n")


def test_a_dimension_no_operator_can_have_names_its_line(tmp_path: Path) -> None:
    """The catalog would refuse the row too, but only after the batches before it."""
    origin = _parse(tmp_path, "m\n4\n0\n")
    facts = RowFacts(operator="gemm", dtype="fp16", device="a30")
    dims = {"m": origin.integers("m"), "n": 8, "k": 8}
    with pytest.raises(InvalidRequestError, match=r"a.csv, line 3: gemm: m is 0, below 1"):
        build_rows(facts, origin, np.arange(2), dims, {"median": np.ones(2)})
