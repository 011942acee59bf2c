"""Records of a file survive the death of the process that wrote them, up to the first torn one."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import StorageFullError
from foretoken.jobs.record_file import KEY_BYTES, RecordFile


def _key(number: int) -> bytes:
    return bytes([number]) * KEY_BYTES


def _open(path: Path) -> RecordFile:
    return RecordFile(path, "what was done")


def test_records_are_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    with _open(tmp_path / "r") as records:
        assert 0 == records.num_found
        records.append(_key(1), b"one")
        records.append(_key(2), b"")
        records.append(_key(1), b"another")
        assert {_key(1): b"one", _key(2): b""} == dict(records)
    with _open(tmp_path / "r") as records:
        assert 2 == records.num_found == len(records)
        assert (b"one", b"", None) == tuple(records.get(_key(number)) for number in (1, 2, 3))


@given(cut=st.integers(0, 400))
def test_a_torn_file_gives_the_records_before_the_tear(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever the crash tore it; and what is appended then is found the next time."""
    path = tmp_path_factory.mktemp("torn") / "r"
    with _open(path) as records:
        for number in range(4):
            records.append(_key(number), b"record %d" % number)
    content = path.read_bytes()
    num_whole = min(cut // (len(content) // 4), 4)
    path.write_bytes(content[: min(cut, len(content))])
    with _open(path) as records:
        assert [_key(number) for number in range(num_whole)] == list(records)
        records.append(_key(9), b"new")
    with _open(path) as records:
        assert (num_whole + 1, b"new") == (len(records), records[_key(9)])


def test_a_record_that_was_changed_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with _open(path) as records:
        records.append(_key(1), b"first")
        records.append(_key(2), b"second")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with _open(path) as records:
        assert [_key(1)] == list(records)


@pytest.mark.parametrize("other", [b"{", b'{"content_hash": "x"}\n' * 9, b"\xff" * 400])
def test_what_is_no_record_is_dropped(tmp_path: Path, other: bytes) -> None:
    """Also where its length would be larger than any memory."""
    path = tmp_path / "r"
    with _open(path) as records:
        records.append(_key(1), b"first")
    whole = path.read_bytes()
    path.write_bytes(whole + other)
    with _open(path) as records:
        assert [_key(1)] == list(records)
    assert whole == path.read_bytes()


def test_another_process_that_still_writes_tears_nothing(tmp_path: Path) -> None:
    """One that was given up for dead while it slept: both processes' records are whole."""
    with _open(tmp_path / "r") as sleeping, _open(tmp_path / "r") as taken:
        sleeping.append(_key(1), b"one")
        taken.append(_key(2), b"two")
        sleeping.append(_key(3), b"three")
        assert (b"one", b"two", b"three") == (
            sleeping[_key(1)], taken[_key(2)], sleeping[_key(3)],
        )  # fmt: skip
    with _open(tmp_path / "r") as records:
        assert 3 == len(records)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageFullError, match="what was done cannot be kept"),
        _open(tmp_path / "no" / "r"),
    ):
        pass


def test_a_disk_that_is_full_leaves_whole_records(tmp_path: Path) -> None:
    """What was written of the record is taken back: a limit of the process stands for the disk."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    path, limit = tmp_path / "r", resource.getrlimit(resource.RLIMIT_FSIZE)
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with _open(path) as records:
        records.append(_key(1), b"1" * 1_000)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, limit[1]))
        try:
            with pytest.raises(StorageFullError, match="make room"):
                records.append(_key(2), b"2" * 1_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, usual)
        assert size == path.stat().st_size
        records.append(_key(3), b"3")
    with _open(path) as records:
        assert [_key(1), _key(3)] == list(records)
        assert struct.calcsize("<32sQI") + 1 == path.stat().st_size - size
