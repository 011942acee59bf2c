"""Archives of strangers are read within a budget."""

import io
import zipfile

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.text_file import Archive, UnpackBudget

_MIB = 2**20


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return content.getvalue()


def test_the_files_of_an_archive_by_name() -> None:
    archive = Archive.open(_zip({"a": b"1", "b/c": b"23", "b/": b""}))
    assert {"a": b"1", "b/c": b"23"} == dict(archive)
    assert (2, 3) == (len(archive), archive.num_bytes)
    with pytest.raises(KeyError):
        archive["b"]


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (UnpackBudget(max_files=1), "more than 1 members"),
        (UnpackBudget(max_bytes=9), "unpacks to more than 9"),
        (UnpackBudget(max_ratio=1, free_bytes=0), "unpacks to more than"),
    ],
)
def test_what_is_beyond_the_budget_is_refused_before_it_is_unpacked(
    budget: UnpackBudget, problem: str
) -> None:
    content = _zip({"a": b"x" * 5, "b": b"y" * 500})
    assert b"x" * 5 == Archive.open(content, UnpackBudget(max_bytes=505))["a"]
    with pytest.raises(InvalidRequestError, match=problem):
        Archive.open(content, budget)


def test_a_bomb_is_refused_and_a_small_archive_of_much_the_same_is_not() -> None:
    assert 60 * _MIB == Archive.open(_zip({"a": bytes(60 * _MIB)})).num_bytes
    with pytest.raises(InvalidRequestError, match="unpacks to more than"):
        Archive.open(_zip({"a": bytes(100 * _MIB)}))


def test_a_file_that_unpacks_to_more_than_the_directory_says_is_damaged() -> None:
    content = bytearray(_zip({"a": bytes(_MIB)}))
    place = content.index(b"PK\x01\x02") + 24
    content[place : place + 4] = (10).to_bytes(4, "little")
    archive = Archive.open(bytes(content))
    assert 10 == archive.num_bytes
    with pytest.raises(InvalidRequestError, match="not a ZIP file that can be read"):
        archive["a"]


def test_other_ways_to_pack_have_no_known_limit_and_are_not_read() -> None:
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with pytest.raises(InvalidRequestError, match="packed in a rare way"):
            Archive.open(_zip({"a": b"1"}, method))


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "\\a", "c:\\a"])
def test_a_name_that_climbs_out_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="leads out of the archive"):
        Archive.open(_zip({name: b"x"}))


def test_what_is_no_archive_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not a ZIP file"):
        Archive.open(b"no archive")
    content = bytearray(_zip({"a": b"text"}, zipfile.ZIP_STORED))
    content[content.index(b"text")] ^= 0xFF
    with pytest.raises(InvalidRequestError, match="not a ZIP file"):
        Archive.open(bytes(content))["a"]
