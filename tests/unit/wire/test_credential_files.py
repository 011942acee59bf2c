"""Files with credentials: what is read, and when they count as changed."""

from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.credential_files import CredentialFiles


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A mounted Secret as a kubelet makes one: files are links through a link to a folder."""
    _replace(tmp_path, "first", {"tls.crt": "certificate 1", "tls.key": "key 1"})
    return tmp_path


def _replace(secret: Path, version: str, contents: dict[str, str]) -> None:
    folder = secret / version
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_text(content)
        if not (secret / name).is_symlink():
            (secret / name).symlink_to(f"..data/{name}")
    (secret / "..new").symlink_to(version)
    (secret / "..new").replace(secret / "..data")


def _files(secret: Path, clock: _Clock) -> CredentialFiles:
    paths = {"certificate": str(secret / "tls.crt"), "key": str(secret / "tls.key"), "ca": ""}
    return CredentialFiles(paths, clock)


def test_contents_are_by_setting_without_those_not_made(secret: Path) -> None:
    assert {"certificate": b"certificate 1", "key": b"key 1"} == _files(secret, _Clock()).read()


def test_a_replaced_secret_has_changed_until_it_is_read(secret: Path) -> None:
    clock = _Clock()
    files = _files(secret, clock)
    files.read()
    clock.now_s = 2.0
    assert not files.has_changed()
    _replace(secret, "second", {"tls.crt": "certificate 2", "tls.key": "key 2"})
    clock.now_s = 4.0
    assert files.has_changed()
    assert {"certificate": b"certificate 2", "key": b"key 2"} == files.read()
    clock.now_s = 6.0
    assert not files.has_changed()


def test_files_are_looked_at_once_a_second(secret: Path) -> None:
    clock = _Clock()
    files = _files(secret, clock)
    files.read()
    _replace(secret, "second", {"tls.crt": "certificate 2", "tls.key": "key 2"})
    clock.now_s = 0.9
    assert not files.has_changed()
    clock.now_s = 1.0
    assert files.has_changed()


def test_files_that_are_away_are_no_change(secret: Path) -> None:
    clock = _Clock()
    files = _files(secret, clock)
    files.read()
    (secret / "..data").unlink()
    clock.now_s = 2.0
    assert not files.has_changed()
    with pytest.raises(InvalidRequestError, match=r"certificate: cannot read .*tls\.crt"):
        files.read()
