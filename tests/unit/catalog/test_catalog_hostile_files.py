"""A hostile or broken file is refused by name, quickly and in little memory, and never blocks."""

import os
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.sources.content import (
    parse_npy,
    parse_source_json,
    parse_source_yaml,
    read_zip_members,
)
from foretoken.catalog.sources.file import SourceFile, limit_reading, read_source_file
from foretoken.catalog.sources.table import parse_csv, parse_parquet
from foretoken.domain.errors import InvalidRequestError

_MIB = 1 << 20
_PATH = Path("folder/a.file")


def _peak_bytes() -> int:
    """Return the most memory that the process held since the peak was forgotten."""
    status = Path("/proc/self/status").read_text("ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@contextmanager
def _little_memory(max_bytes: int = 64 * _MIB) -> Iterator[None]:
    # Not by tracemalloc: its stop crashes a native thread that allocates meanwhile, such as
    # Arrow's (CPython 128679, in 3.11 and 3.12).
    with suppress(OSError):  # a kernel that does not forget: the peak so far counts then
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = _peak_bytes()
    yield
    assert _peak_bytes() - before < max_bytes


def test_memory_that_is_taken_is_seen() -> None:
    with pytest.raises(AssertionError), _little_memory():
        assert b"x" * (128 * _MIB)


def _source(content: bytes) -> SourceFile:
    return SourceFile("a.file", "hash", content)


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the whole path may be too long for a socket's name
        server.bind(path.name)
        os.chdir(here)


@pytest.mark.parametrize(
    "make",
    [
        _fifo,
        _socket,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/tty"),
    ],
    ids=["fifo", "socket", "folder", "zero", "tty"],
)
def test_what_is_no_regular_file_does_not_block(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    make(path)
    with pytest.raises(InvalidRequestError, match=r"a\.csv: (not a regular file|leads out of)"):
        read_source_file(path, tmp_path)
    with pytest.raises(InvalidRequestError, match=r"a\.csv: not a regular file"):
        read_source_file(path, path)


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_read(tmp_path: Path) -> None:
    root = tmp_path / "import"
    root.mkdir()
    (tmp_path / "secret.csv").write_text("x\n1\n")
    (root / "inside.csv").write_text("x\n2\n")
    (root / "out.csv").symlink_to("../secret.csv")
    (root / "in.csv").symlink_to("inside.csv")
    (root / "loop.csv").symlink_to("loop.csv")
    with pytest.raises(InvalidRequestError, match=r"out\.csv: leads out of"):
        read_source_file(root / "out.csv", root)
    with pytest.raises(InvalidRequestError, match=r"secret\.csv: leads out of"):
        read_source_file(root / ".." / "secret.csv", root)
    with pytest.raises(InvalidRequestError, match=r"loop\.csv"):
        read_source_file(root / "loop.csv", root)
    assert b"x\n2\n" == read_source_file(root / "in.csv", root).content


def test_a_link_that_the_user_named_is_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("x\n1\n")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "a.csv").symlink_to("data/a.csv")
    for path, root in (("link/a.csv", "link"), ("a.csv", "a.csv")):
        assert b"x\n1\n" == read_source_file(tmp_path / path, tmp_path / root).content


def test_a_file_that_grows_while_it_is_read_is_refused() -> None:
    """The kernel makes these files up as they are read; their size says 0."""
    with pytest.raises(InvalidRequestError, match="status: changed while it was read"):
        read_source_file(Path("/proc/self/status"), Path("/proc/self/status"))


def test_a_name_that_cannot_be_printed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m.csv"
    path.write_text("x\n1\n")
    with pytest.raises(InvalidRequestError, match="name cannot be printed"):
        read_source_file(path, tmp_path)


def test_ten_gigabytes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.touch()
    os.truncate(path, 10 << 30)
    with _little_memory(), pytest.raises(InvalidRequestError, match=r"a\.csv: .*max_bytes=N"):
        read_source_file(path, tmp_path)


def test_all_files_of_an_import_share_what_it_may_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x" * 60)
    with limit_reading(100):
        read_source_file(tmp_path / "a", tmp_path)
        with pytest.raises(InvalidRequestError, match="b: holds 60 bytes, 40 are left of the 100"):
            read_source_file(tmp_path / "b", tmp_path)


@pytest.mark.parametrize("max_bytes", ["", "-1", "1e9", "²"])
def test_the_limit_is_a_count(max_bytes: str, tmp_path: Path) -> None:
    request = ImportRequest(path=tmp_path, options={"max_bytes": max_bytes})
    with pytest.raises(InvalidRequestError, match=r"options\.max_bytes"):
        find_importer("vidur").read(request)


@pytest.mark.parametrize("head", [b"", b"x,y\n1,2\n"], ids=["first", "later"])
def test_an_endless_line_is_refused(head: bytes) -> None:
    source = _source(head + b"1," * (8 * _MIB))
    with _little_memory(), pytest.raises(InvalidRequestError, match=r"a\.file: line [13]: longer"):
        parse_csv(source, _PATH)


def test_very_many_columns_are_refused() -> None:
    source = _source(b"," * 5000 + b"\n1\n")
    with pytest.raises(InvalidRequestError, match="5001 columns"):
        parse_csv(source, _PATH)


def test_one_long_cell_does_not_widen_a_column_of_text() -> None:
    source = _source(b"x,y\n" + b"a" * 100_000 + b",1\n" + b"b,1\n" * 20_000)
    with (
        _little_memory(),
        pytest.raises(InvalidRequestError, match=r"line 2: x: 'a+' is too long"),
    ):
        parse_csv(source, _PATH).texts("x")


@pytest.mark.parametrize("padding", [0, 1 << 20], ids=["first", "second"])
def test_what_is_not_utf_8_names_its_line(padding: int) -> None:
    source = _source(b"x\n" + b"1\n" * (padding // 2) + b"\xff\xfe\n")
    line = 2 + padding // 2
    with pytest.raises(InvalidRequestError, match=f"line {line}: not UTF-8"):
        parse_csv(source, _PATH)


def test_a_parquet_file_that_unpacks_to_far_more_is_refused() -> None:
    """Twenty million equal numbers are a few kB in the file."""
    buffer = BytesIO()
    parquet.write_table(pa.table({"x": pa.repeat(1.0, 20_000_000)}), buffer)
    content = buffer.getvalue()
    assert len(content) < _MIB
    with (
        limit_reading(100 * _MIB),
        _little_memory(),
        pytest.raises(InvalidRequestError, match=r"a\.file: holds 160000000 bytes"),
    ):
        parse_parquet(_source(content), _PATH)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"x": [[1]]}), "'x' is nested"),
        (pa.table({"x": pa.array([], pa.int64())}), "has no rows"),
        (pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), "columns twice: x"),
    ],
)
def test_a_parquet_file_that_is_no_table_is_refused(table: pa.Table, message: str) -> None:
    buffer = BytesIO()
    parquet.write_table(table, buffer)
    with pytest.raises(InvalidRequestError, match=message):
        parse_parquet(_source(buffer.getvalue()), _PATH)


@pytest.mark.parametrize("cut", [0, 3, 4, 20, -1])
def test_a_parquet_file_that_was_cut_is_refused(cut: int) -> None:
    buffer = BytesIO()
    parquet.write_table(pa.table({"x": [1, 2]}), buffer)
    with pytest.raises(InvalidRequestError, match=r"a\.file: not a Parquet file"):
        parse_parquet(_source(buffer.getvalue()[:cut]), _PATH)


def test_a_zip_bomb_is_refused_before_it_unpacks() -> None:
    source = _source(_zip({"a": bytes(300 * _MIB)}))
    assert len(source.content) < _MIB
    with (
        limit_reading(100 * _MIB),
        _little_memory(),
        pytest.raises(InvalidRequestError, match=r"a\.file: holds 314572800 bytes"),
    ):
        read_zip_members(source, _PATH)


@pytest.mark.parametrize(
    "name", ["../a", "a/../../b", "/etc/passwd", "\\a", "c:\\a", "a\\..\\..\\b"]
)
def test_a_zip_member_that_climbs_out_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="leads out of the archive"):
        read_zip_members(_source(_zip({name: b"x"})), _PATH)


def test_a_zip_of_too_many_members_is_refused() -> None:
    source = _source(_zip({str(index): b"" for index in range(10_001)}))
    with pytest.raises(InvalidRequestError, match="more than 10000 members"):
        read_zip_members(source, _PATH)


@pytest.mark.parametrize("place", [14, 18, 22, 30, 60])
def test_a_damaged_zip_is_refused(place: int) -> None:
    """One byte of the local header or the data is another."""
    content = bytearray(_zip({"a": os.urandom(100)}))
    content[place] ^= 0xFF
    try:
        assert ["a"] == list(read_zip_members(_source(bytes(content)), _PATH))
    except InvalidRequestError as err:
        assert "a.file" in err.message  # noqa: PT017 - some fields are there twice
    with pytest.raises(InvalidRequestError, match=r"a\.file: not a ZIP file"):
        read_zip_members(_source(bytes(content[:50])), _PATH)


def test_yaml_aliases_are_read() -> None:
    found = parse_source_yaml(_source(b"a: &one {b: 1}\nc: [*one, *one]"), _PATH)
    assert {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]} == found


def test_yaml_aliases_that_multiply_are_refused() -> None:
    """Nine levels of nine are 400 million values."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)),
    ]
    with pytest.raises(InvalidRequestError, match=r"a\.file: line 7: stands for more"):
        parse_source_yaml(_source("\n".join(lines).encode()), _PATH)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: " + b"[" * 200, "line 1: nested deeper"),
        (b"a: &a [*a]", "line 1: a YAML alias of nothing"),
        (b"a: 1\n" * 200_000, "too much for a YAML file"),
        (b"a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        (b"a: " + b"9" * 5000, "not valid YAML"),
        (b"a: 2001-99-99", "not valid YAML"),
        (b"a: \xff", "not UTF-8"),
        (b"[1]", "expected a mapping"),
        (b"a: 1: 2", "not valid YAML"),
    ],
    ids=["deep", "in itself", "large", "object", "number", "date", "bytes", "list", "syntax"],
)
def test_yaml_that_cannot_be_used_is_refused(content: bytes, message: str) -> None:
    with _little_memory(), pytest.raises(InvalidRequestError, match=rf"a\.file: .*{message}"):
        parse_source_yaml(_source(content), _PATH)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "nested too deep"),
        (b"9" * 5000, "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "line 1: not UTF-8"),
        (b" " * (65 * _MIB), "too much for a JSON file"),
    ],
    ids=["deep", "number", "syntax", "bytes", "large"],
)
def test_json_that_cannot_be_used_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"a\.file: .*{message}"):
        parse_source_json(_source(content), _PATH)


def _npy(array: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_an_array_is_read_as_it_was_saved() -> None:
    array = np.arange(6.0).reshape(2, 3)
    for saved in (array, np.asfortranarray(array), array.astype(">f4"), np.float64(3)):
        np.testing.assert_array_equal(saved, parse_npy(_npy(np.asarray(saved)), _PATH))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_npy(np.array([{"a": 1}], dtype=object)), "Python objects"),
        (_npy(np.zeros(3)).replace(b"(3,), ", b"(9**9)"), "not an .npy"),
        (_npy(np.zeros(3)).replace(b"(3,)", b"(((("), "not an .npy"),
        (_npy(np.zeros(3)).replace(b"(3,), }           ", b"(3000000000000,),}"), "not the size"),
        (_npy(np.zeros(3))[:-1], "not the size"),
        (_npy(np.zeros(30)).replace(b"(30,)", b"(-1,)"), "not the size"),
        (_npy(np.zeros(30)).replace(b"(30,)", b"(99,)"), "not the size"),
        (b"\x93NUMPY\x09\x00", "unknown version"),
        (b"PK", "not an .npy"),
    ],
)
def test_an_array_that_claims_what_it_has_not_is_refused(content: bytes, message: str) -> None:
    with _little_memory(), pytest.raises(InvalidRequestError, match=message):
        parse_npy(content, _PATH)


def test_a_log_of_one_endless_line_is_refused_before_it_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_bytes(b"# nccl-tests version 2.17\n" + b"1" * (8 * _MIB))
    with _little_memory(), pytest.raises(InvalidRequestError, match="line 2: longer than 1048576"):
        find_importer("nccl_tests").read(ImportRequest(path=path))


def test_long_lines_of_other_programs_in_a_log_are_passed_over(tmp_path: Path) -> None:
    """A line that would take a pattern minutes is not tried."""
    path = tmp_path / "all_reduce.log"
    rank = "#  Rank  0 Pid 1 on host device  0 [0x00] GPU" + " " * 500_000 + "x"
    path.write_text(f"{rank}\n{rank}\n")
    with pytest.raises(InvalidRequestError, match="has no table of nccl-tests"):
        find_importer("nccl_tests").read(ImportRequest(path=path))
